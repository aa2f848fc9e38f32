//! Images of operands in the operator's environment, under the names that bundles of NVIDIA's operator use.

use std::collections::BTreeMap;

use clap::Args;

/// For policies that name no image.
#[derive(Debug, Args)]
pub(super) struct ImageArgs {
    #[arg(long = "driver-image", env = "DRIVER_IMAGE", hide = true)]
    driver: Option<String>,
    #[arg(long = "toolkit-image", env = "CONTAINER_TOOLKIT_IMAGE", hide = true)]
    toolkit: Option<String>,
    #[arg(long = "device-plugin-image", env = "DEVICE_PLUGIN_IMAGE", hide = true)]
    device_plugin: Option<String>,
    #[arg(long = "gfd-image", env = "GFD_IMAGE", hide = true)]
    gfd: Option<String>,
    #[arg(long = "dcgm-image", env = "DCGM_IMAGE", hide = true)]
    dcgm: Option<String>,
    #[arg(long = "dcgm-exporter-image", env = "DCGM_EXPORTER_IMAGE", hide = true)]
    dcgm_exporter: Option<String>,
    #[arg(long = "mig-manager-image", env = "MIG_MANAGER_IMAGE", hide = true)]
    mig_manager: Option<String>,
    #[arg(long = "gds-image", env = "GDS_IMAGE", hide = true)]
    gds: Option<String>,
    #[arg(long = "gdrcopy-image", env = "GDRCOPY_IMAGE", hide = true)]
    gdrcopy: Option<String>,
}

impl ImageArgs {
    /// By section of a ClusterPolicy.
    pub(super) fn by_section(self) -> BTreeMap<String, String> {
        [
            ("driver", self.driver),
            ("toolkit", self.toolkit),
            ("devicePlugin", self.device_plugin),
            ("gfd", self.gfd),
            ("dcgm", self.dcgm),
            ("dcgmExporter", self.dcgm_exporter),
            ("migManager", self.mig_manager),
            ("gds", self.gds),
            ("gdrcopy", self.gdrcopy),
        ]
        .into_iter()
        .filter_map(|(section, image)| Some((section.to_owned(), image.filter(|image| !image.is_empty())?)))
        .collect()
    }
}
