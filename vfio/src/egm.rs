//! Extended GPU memory: on Grace boards a part of the host's memory belongs to the GPUs of a socket, and a VM that has all
//! of them can have it through a device node of its own (NVIDIA's driver `nvgrace_egm`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::address::PciAddress;
use crate::host::{self, Host};

pub(crate) const EGM: &str = "/sys/class/egm";

/// Device nodes, e.g. `/dev/egm0`, each with the GPUs whose memory it is (`/sys/class/egm/egm0/gpu_devices`). Empty on
/// hosts without such memory. Left out are nodes whose GPUs cannot be read, since they could go to the wrong VM, and those
/// that are not there, since a container that is promised one does not start.
pub fn egm(host: &impl Host) -> BTreeMap<PathBuf, BTreeSet<PciAddress>> {
    let names = host.list(Path::new(EGM)).unwrap_or_default();
    let memory = names.iter().filter_map(|name| {
        let text = host::text(host, &Path::new(EGM).join(name).join("gpu_devices")).ok()?;
        let words = text.split(|c: char| c.is_ascii_whitespace() || c == ',').filter(|word| !word.is_empty());
        let gpus: BTreeSet<PciAddress> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
        let node = Path::new("/dev").join(name);
        (!gpus.is_empty() && host.exists(&node)).then_some((node, gpus))
    });
    memory.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Machine;

    #[test]
    fn each_node_has_the_gpus_of_its_socket() {
        let machine = Machine::described("gb200-bound");
        let gpus = ["0008:01:00.0", "0009:01:00.0"].map(|address| address.parse().unwrap());
        assert_eq!(egm(&machine), BTreeMap::from([("/dev/egm0".into(), BTreeSet::from(gpus))]));
        machine.remove("/dev/egm0");
        assert_eq!(egm(&machine), BTreeMap::new(), "no node");
    }

    #[test]
    fn memory_of_gpus_that_cannot_be_told_is_left_out() {
        let machine = Machine::described("gb200-bound");
        for text in ["", "0008:01:00.0 rubbish\n"] {
            machine.write("/sys/class/egm/egm0/gpu_devices", text);
            assert_eq!(egm(&machine), BTreeMap::new(), "{text:?}");
        }
    }
}
