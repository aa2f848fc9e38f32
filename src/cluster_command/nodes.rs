//! `kubectl gpuvirt nodes`: a line for each GPU node.

use super::{
    Target,
    fleet::Fleet,
    report::{NodeReport, StatusReport, report},
    status::{Error, offered},
};
use crate::{
    answer::Output,
    terminal::{BAD, Cell, GOOD, PLAIN, STRONG, WARN, table},
};

pub async fn run(target: &Target, output: Output) -> Result<(), Error> {
    let (client, _) = target.connect().await?;
    let StatusReport { nodes, .. } = report(&Fleet::read(&client).await?);
    Ok(output.print(&nodes, |nodes| text(nodes))?)
}

pub fn text(nodes: &[NodeReport]) -> String {
    let head = ["NODE", "READY", "MODE", "GPUS", "IN USE", "DRIVER", "OS", "KERNEL", "IOMMU", "AGENT", "OFFERS"];
    let mut rows: Vec<Vec<Cell>> = vec![head.map(|title| Cell::new(STRONG, title)).into()];
    rows.extend(nodes.iter().map(row));
    table(&rows)
}

fn row(node: &NodeReport) -> Vec<Cell> {
    let (style, ready) = match (node.ready, node.is_changing()) {
        (true, _) => (GOOD, "True"),
        (false, true) => (WARN, "False"),
        (false, false) => (BAD, "False"),
    };
    let driver = match &node.driver_version {
        Some(version) if !version.is_empty() => format!("{} ({version})", node.driver),
        Some(_) | None => node.driver.clone(),
    };
    let host = node.host.clone();
    let (iommu_style, iommu) = match &host {
        None => (PLAIN, "-"),
        Some(host) if host.iommu => (PLAIN, "on"),
        Some(_) => (BAD, "off"),
    };
    let (os, kernel) = host.map(|host| (host.os, host.kernel)).unzip();
    let driver = Some(driver).filter(|driver| !driver.is_empty());
    vec![
        Cell::new(PLAIN, node.name.clone()),
        Cell::new(style, ready),
        Cell::new(PLAIN, node.modes()),
        Cell::new(PLAIN, node.gpus.total.to_string()),
        Cell::new(PLAIN, node.gpus.in_use.to_string()),
        Cell::plain(driver),
        Cell::plain(os),
        Cell::plain(kernel),
        Cell::new(iommu_style, iommu),
        Cell::plain(Some(node.agent.clone())),
        Cell::plain(Some(offered(&node.offers))),
    ]
}
