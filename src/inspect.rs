//! `gpuvirt inspect`: what a host has, for a person, without a cluster.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use vfio::{Function, Gpu, Inventory};

use crate::agent::device_plugin::names;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("host root {root} cannot be opened")]
    Root { root: PathBuf, source: std::io::Error },
}

#[expect(clippy::print_stdout, reason = "this command's answer goes to standard output")]
pub fn run(host_root: &Path) -> Result<(), Error> {
    let root = vfio::Root::new(host_root).map_err(|source| Error::Root { root: host_root.to_owned(), source })?;
    let inventory = vfio::observe(&root);
    let holders = vfio::holders(&root, &inventory);
    print!("{}", text(&inventory));
    for holder in holders.values().flatten() {
        println!("in use: {holder}");
    }
    Ok(())
}

fn text(inventory: &Inventory) -> String {
    let facts = &inventory.facts;
    let mut text = format!(
        "kernel {} {}, {} {}, IOMMU {}, iommufd {}\n",
        facts.kernel_release,
        facts.architecture,
        facts.os_id,
        facts.os_version,
        if facts.iommu { "on" } else { "off" },
        if facts.iommufd { "yes" } else { "no" },
    );
    let gpus = inventory.gpus();
    if gpus.is_empty() {
        text.push_str("no NVIDIA GPU\n");
    }
    for gpu in &gpus {
        write_gpu(&mut text, gpu);
    }
    for error in &inventory.errors {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "not readable: {error}");
    }
    text
}

fn write_gpu(text: &mut String, gpu: &Gpu<'_>) {
    let group = gpu.group.map_or_else(|| "none".to_owned(), |group| group.to_string());
    let primary = gpu.primary;
    let product = names::product(primary.vendor, primary.device).unwrap_or("unknown");
    let _ = writeln!(text, "{} {product}, IOMMU group {group}", line(primary));
    for companion in &gpu.companions {
        let _ = writeln!(text, "  with {}", line(companion));
    }
    for foreign in &gpu.foreign {
        let _ = writeln!(text, "  foreign in its group: {}", line(foreign));
    }
}

fn line(function: &Function) -> String {
    format!(
        "{} {:04x}:{:04x} class {:06x} driver {}",
        function.address,
        function.vendor,
        function.device,
        function.class,
        function.driver.as_deref().unwrap_or("none")
    )
}
