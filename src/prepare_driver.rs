//! `gpuvirt prepare-driver`: the init container of driver pods.
//!
//! An earlier driver pod may have left its modules loaded and its root mounted. Modules of the very driver that is to come
//! stay, so that what runs on them goes on. Others are unloaded in their order of dependence once nobody uses them; who
//! does is named until the deadline, and then the kubelet tries again. GPUs on vfio-pci are not the driver's and are not
//! looked at. No pod is evicted and no label is written here.

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    kmod::{DeleteModuleFlags, delete_module},
    mount::{MntFlags, umount2},
};
use vfio::{Host, Root};

use crate::{
    host_driver::{self, Origin},
    nvml,
    shutdown::Shutdown,
    validator::{self, until_passed},
};

/// Users before what they use (gpu-operator 26.7, k8s-driver-manager).
const MODULES: [&str; 8] = [
    "nvidia_vgpu_vfio",
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "nvidia_fs",
    "gdrdrv",
    "nvidia",
];
/// The kernel's own driver, which takes GPUs that nothing else has.
const NOUVEAU: &str = "nouveau";
const NVML_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct Options {
    /// Where the host's `/` is mounted.
    pub host_root: PathBuf,
    /// The host's `/run/nvidia`, so mounted that what is unmounted there is unmounted on the host.
    pub run_dir: PathBuf,
    /// Of the driver that is to come: what it is made of and how it is set.
    pub digest: Option<String>,
    /// How long users of an old driver are waited for.
    pub patience: Duration,
    /// This program, to be run as a child.
    pub helper: OsString,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "this host has a driver of its own ({version}), which is left alone: the node's label nvidia.com/gpu.deploy.driver becomes pre-installed, and this pod goes; to have gpuvirt's driver here, uninstall the host's"
    )]
    HostDriver { version: String },
    #[error(transparent)]
    Waited(#[from] validator::Error),
    #[error("{path} cannot be unmounted", path = path.display())]
    Unmount { path: PathBuf, source: Errno },
    #[error("{path} cannot be read or removed", path = path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("host root {root} cannot be opened: mount the host's file system there or set --host-root")]
    Root { root: PathBuf, source: io::Error },
}

pub async fn run(options: &Options, shutdown: &Shutdown) -> Result<(), Error> {
    let root =
        Root::new(&options.host_root).map_err(|source| Error::Root { root: options.host_root.clone(), source })?;
    if let Some(version) = own_driver(options, &root).await {
        return Err(Error::HostDriver { version });
    }
    if same_driver(options, &root) {
        tracing::info!(
            "the driver that is to come is loaded already, with the same settings: it stays, and so does what uses it"
        );
    } else {
        let attempt = async || unload_all(&root, &mut |module| unload(module));
        until_passed(options.patience, shutdown, attempt, |_| Ok(())).await?;
    }
    unmount(&options.run_dir.join("driver"))?;
    // A pod that was killed has not taken back what it said of itself.
    for stale in ["nvidia-driver.pid", "validations/.driver-ctr-ready", "validations/.driver-daemons-status"] {
        let path = options.run_dir.join(stale);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(Error::File { path, source }),
            Ok(()) | Err(_) => {}
        }
    }
    tracing::info!("ready for the driver");
    Ok(())
}

/// The version of the host's own driver, where it is in use. Where it lies in an odd place, its library says so itself.
async fn own_driver(options: &Options, root: &Root) -> Option<String> {
    let loaded = host_driver::look(root)?;
    match loaded.origin {
        Origin::Host => return Some(loaded.version),
        Origin::HostIdle => return None,
        Origin::Pod => {}
    }
    let programs = host_driver::PROGRAMS.iter().any(|path| root.exists(Path::new(path)));
    if !programs || host_driver::of_a_pod(root) {
        return None;
    }
    let asked = nvml::ask(&options.helper, &options.host_root, true, NVML_PATIENCE).await;
    asked.ok().map(|report| report.driver)
}

/// NVIDIA's image notes there what it has loaded.
fn same_driver(options: &Options, root: &Root) -> bool {
    let noted = fs::read_to_string(options.run_dir.join("nvidia-driver.state")).unwrap_or_default();
    let same = options.digest.as_deref().is_some_and(|digest| !digest.is_empty() && noted.trim() == digest);
    same && loaded(root, "nvidia")
}

fn unload(module: &str) -> Result<(), Errno> {
    let name = std::ffi::CString::new(module).expect("a module's name should have no NUL");
    delete_module(&name, DeleteModuleFlags::O_NONBLOCK)
}

/// What is in use stays, with all that it is used by; says who uses it.
fn unload_all(root: &Root, unload: &mut impl FnMut(&str) -> Result<(), Errno>) -> Result<(), String> {
    for module in MODULES {
        if !loaded(root, module) {
            continue;
        }
        if references(root, module)? > 0 {
            return Err(format!(
                "module {module} is in use by {}: end what uses the GPUs of this node, the driver comes by itself then",
                users(root, module)
            ));
        }
        unload(module).map_err(|source| format!("module {module} cannot be unloaded: {source}"))?;
        tracing::info!(module, "unloaded");
    }
    if loaded(root, NOUVEAU) {
        let step =
            "blacklist nouveau on the host (modprobe.blacklist=nouveau on the kernel's command line) and boot it";
        if references(root, NOUVEAU)? > 0 {
            return Err(format!("module nouveau has the GPUs and is in use, by a console or a display: {step}"));
        }
        unload(NOUVEAU).map_err(|source| format!("module nouveau cannot be unloaded: {source}; {step}"))?;
        tracing::info!(module = NOUVEAU, "unloaded");
    }
    Ok(())
}

/// A module that is built in has no `refcnt` and cannot be unloaded.
fn loaded(root: &Root, module: &str) -> bool {
    root.exists(&refcnt(module))
}

fn refcnt(module: &str) -> PathBuf {
    Path::new("/sys/module").join(module).join("refcnt")
}

fn references(root: &Root, module: &str) -> Result<u64, String> {
    let path = refcnt(module);
    let text = root.read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let text = String::from_utf8_lossy(&text);
    text.trim().parse().map_err(|_| format!("{} is no number: {}", path.display(), text.trim()))
}

/// Other modules, and processes that have a GPU open.
fn users(root: &Root, module: &str) -> String {
    let inventory = vfio::observe(root);
    let mut users: Vec<String> = vfio::holders(root, &inventory).values().flatten().map(ToString::to_string).collect();
    let holders = root.list(&Path::new("/sys/module").join(module).join("holders")).unwrap_or_default();
    users.extend(holders.iter().map(|name| format!("module {}", name.to_string_lossy())));
    if users.is_empty() {
        users.push("a process that cannot be named (nvidiactl or nvidia-uvm may be open)".to_owned());
    }
    users.join(", ")
}

/// Everything that is mounted at this directory and below it, the last first. Files that are open there stay open.
fn unmount(directory: &Path) -> Result<(), Error> {
    let path = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(path).map_err(|source| Error::File { path: path.to_owned(), source })?;
    for mounted in below(&table, directory).into_iter().rev() {
        match umount2(&mounted, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            // It went with one above it.
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(source) => return Err(Error::Unmount { path: mounted, source }),
        }
        tracing::info!(path = %mounted.display(), "unmounted, left by an earlier driver");
    }
    Ok(())
}

/// Mount points of a `mountinfo` at `directory` and below it, in the order in which they were mounted.
fn below(table: &str, directory: &Path) -> Vec<PathBuf> {
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(|point| PathBuf::from(unescaped(point)));
    points.filter(|point| point.starts_with(directory)).collect()
}

/// The kernel writes blanks, tabs, newlines and backslashes as octal numbers.
fn unescaped(point: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(point.to_owned(), |text, (escape, plain)| text.replace(escape, plain))
}

#[cfg(test)]
mod tests {
    use vfio::testing::Machine;

    use super::*;

    struct Driver {
        machine: Machine,
        run: tempfile::TempDir,
    }

    impl Driver {
        /// A host on which a driver pod has left these modules, unused.
        fn left(modules: &[&str]) -> Self {
            let machine = Machine::described("v100");
            for module in modules {
                machine.write(&format!("/sys/module/{module}/refcnt"), "0\n");
            }
            Self { machine, run: tempfile::tempdir().expect("tempdir") }
        }

        fn root(&self) -> Root {
            Root::new(self.machine.path()).expect("a root")
        }

        /// What was unloaded, in this order.
        fn unload(&self) -> (Vec<String>, Result<(), String>) {
            let mut unloaded = Vec::new();
            let done = unload_all(&self.root(), &mut |module| {
                unloaded.push(module.to_owned());
                Ok(())
            });
            (unloaded, done)
        }

        async fn run(&self, digest: Option<&str>) -> Result<(), Error> {
            let (_stop, shutdown) = Shutdown::manual();
            let options = Options {
                host_root: self.machine.path().to_owned(),
                run_dir: self.run.path().to_owned(),
                digest: digest.map(str::to_owned),
                patience: Duration::ZERO,
                helper: "/nonexistent".into(),
            };
            run(&options, &shutdown).await
        }
    }

    #[tokio::test]
    async fn a_host_without_a_driver_is_ready_and_stale_files_of_a_killed_pod_go() {
        let host = Driver::left(&[]);
        let ready = host.run.path().join("validations/.driver-ctr-ready");
        fs::create_dir_all(ready.parent().expect("a parent")).expect("folder");
        fs::write(&ready, "").expect("file");
        host.run(None).await.expect("nothing to unload");
        assert!(!ready.exists());
    }

    #[test]
    fn modules_go_in_their_order_and_nouveau_too() {
        let host = Driver::left(&["nvidia", "nvidia_uvm", "nvidia_modeset", "nouveau"]);
        let (unloaded, done) = host.unload();
        assert_eq!(
            (unloaded, done),
            (["nvidia_modeset", "nvidia_uvm", "nvidia", "nouveau"].map(str::to_owned).into(), Ok(()))
        );
    }

    #[tokio::test]
    async fn a_driver_in_use_is_named_and_left() {
        let host = Driver::left(&["nvidia"]);
        host.machine.write("/sys/module/nvidia_uvm/refcnt", "2\n");
        assert_eq!(host.unload().0, [] as [&str; 0]);
        let error = host.run(None).await.expect_err("in use").to_string();
        assert!(error.contains("nvidia_uvm is in use by a process that cannot be named"), "{error}");
    }

    #[test]
    fn a_console_on_nouveau_is_told_how_to_leave_it() {
        let host = Driver::left(&[]);
        host.machine.write("/sys/module/nouveau/refcnt", "3\n");
        let why = host.unload().1.expect_err("in use");
        assert!(why.contains("modprobe.blacklist=nouveau"), "{why}");
    }

    #[test]
    fn an_unreadable_count_is_an_error_that_names_the_file() {
        let host = Driver::left(&[]);
        host.machine.write("/sys/module/nvidia/refcnt", "many");
        assert!(host.unload().1.expect_err("unreadable").contains("/sys/module/nvidia/refcnt is no number"));
    }

    #[tokio::test]
    async fn the_same_driver_stays_loaded_under_its_users_and_another_does_not() {
        let host = Driver::left(&[]);
        host.machine.write("/sys/module/nvidia/refcnt", "4\n");
        fs::write(host.run.path().join("nvidia-driver.state"), "0badcafe\n").expect("file");
        host.run(Some("0badcafe")).await.expect("it is the same");
        assert!(matches!(host.run(Some("0badbabe")).await, Err(Error::Waited(_))));
        assert!(matches!(host.run(None).await, Err(Error::Waited(_))));
    }

    #[tokio::test]
    async fn a_hosts_own_driver_is_never_unloaded() {
        let host = Driver::left(&["nvidia"]);
        host.machine.write("/sys/module/nvidia/version", "570.1\n");
        host.machine.write("/usr/bin/nvidia-smi", "");
        host.machine.write("/usr/lib64/libnvidia-ml.so.570.1", "");
        let error = host.run(None).await.expect_err("it is the host's");
        assert!(matches!(&error, Error::HostDriver { version } if version == "570.1"), "{error}");
        assert!(error.to_string().contains("pre-installed"), "{error}");
    }

    #[test]
    fn mounts_of_an_old_root_are_found_and_no_others() {
        let table = "36 35 98:0 / /run/nvidia rw - tmpfs tmpfs rw\n37 36 98:0 / /run/nvidia/driver rw - overlay o rw\n38 37 0:5 / /run/nvidia/driver/a\\040b rw - proc proc rw\n39 36 98:0 / /run/nvidia/driver-old rw - overlay o rw\n";
        let found = below(table, Path::new("/run/nvidia/driver"));
        assert_eq!(found, [PathBuf::from("/run/nvidia/driver"), PathBuf::from("/run/nvidia/driver/a b")]);
    }
}
