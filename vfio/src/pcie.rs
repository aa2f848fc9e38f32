//! How a function is doing on the bus: its link, its errors, whether it answers at all.

use std::fmt;

use serde::Serialize;

/// What one end of a link can do, or does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LinkState {
    /// Megatransfers a second and lane (`16.0 GT/s PCIe` is 16000); `None` where the kernel says `Unknown`.
    pub speed: Option<u32>,
    /// Lanes; 0 while no link is up.
    pub width: u8,
}

/// The `PCIe` link of a function (`current_link_speed` and the three beside it, `drivers/pci/pci-sysfs.c`).
///
/// An idle GPU lowers its speed to save power; lanes that are missing stay missing, so they are what health can judge by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    /// What both ends have agreed on.
    pub current: LinkState,
    /// Of the function itself: the slot may give less.
    pub maximum: LinkState,
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.speed {
            Some(speed) => write!(f, "{}.{} GT/s x{}", speed / 1000, speed % 1000 / 100, self.width),
            None => write!(f, "unknown speed x{}", self.width),
        }
    }
}

/// Errors that a function has reported since boot, all kinds together (`aer_dev_correctable`, `aer_dev_nonfatal`,
/// `aer_dev_fatal`; `Documentation/ABI/testing/sysfs-bus-pci-devices-aer`, Linux 4.19 with `CONFIG_PCIEAER`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Aer {
    /// Put right by the hardware; many of them tell of a bad slot or riser.
    pub correctable: u64,
    /// A transaction was lost, the link goes on.
    pub nonfatal: u64,
    /// The link is not to be trusted any more.
    pub fatal: u64,
}

/// Whether a function answers when its configuration space is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Presence {
    /// It does.
    Answers,
    /// All bits read as one, which no device of its own says: it has fallen off the bus.
    FellOff,
}

/// From the four texts of a link; `None` where one is no number of lanes or no speed.
pub(crate) fn link(current: [&str; 2], maximum: [&str; 2]) -> Option<Link> {
    Some(Link { current: state(current)?, maximum: state(maximum)? })
}

fn state([speed, width]: [&str; 2]) -> Option<LinkState> {
    // A function that does not answer has all six bits of the width set.
    let width = width.parse().ok().filter(|width| *width <= 32)?;
    Some(LinkState { speed: megatransfers(speed), width })
}

/// `2.5 GT/s PCIe`, `8 GT/s` before Linux 5.7, `Unknown`.
fn megatransfers(text: &str) -> Option<u32> {
    let (number, _) = text.split_once(" GT/s")?;
    let (whole, tenth) = number.split_once('.').unwrap_or((number, "0"));
    let (whole, tenth) = (whole.parse::<u32>().ok()?, tenth.parse::<u32>().ok().filter(|tenth| *tenth < 10)?);
    whole.checked_mul(1000)?.checked_add(tenth * 100)
}

/// The last line of one of the three tables, `TOTAL_ERR_COR 0`.
pub(crate) fn total_errors(table: &str) -> Option<u64> {
    table.lines().find_map(|line| line.strip_prefix("TOTAL_ERR_")?.split_once(' ')?.1.trim().parse().ok())
}

/// From the first bytes of the configuration space of a function that is no virtual one (those have all ones for ids).
pub(crate) fn presence(config: &[u8]) -> Option<Presence> {
    let ids = config.get(..4)?;
    Some(if ids.iter().all(|byte| *byte == 0xff) { Presence::FellOff } else { Presence::Answers })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read_in_all_spellings_of_the_kernel() {
        for (text, speed) in [
            ("2.5 GT/s PCIe", Some(2500)),
            ("16.0 GT/s PCIe", Some(16_000)),
            ("8 GT/s", Some(8000)),
            ("Unknown", None),
            ("Unknown speed", None),
            ("x GT/s", None),
            ("", None),
        ] {
            assert_eq!(megatransfers(text), speed, "{text}");
        }
    }

    #[test]
    fn a_link_of_a_function_that_does_not_answer_is_no_link() {
        assert_eq!(link(["Unknown", "63"], ["16.0 GT/s PCIe", "16"]), None);
        let narrow = link(["2.5 GT/s PCIe", "8"], ["16.0 GT/s PCIe", "16"]).unwrap();
        assert_eq!(
            (narrow.current.to_string(), narrow.maximum.to_string()),
            ("2.5 GT/s x8".into(), "16.0 GT/s x16".into())
        );
    }

    #[test]
    fn errors_are_counted_by_the_total_line() {
        let table = "RxErr 4\nBadTLP 1\nTOTAL_ERR_COR 5\n";
        assert_eq!(total_errors(table), Some(5));
        assert_eq!(total_errors("RxErr 4\n"), None);
    }

    #[test]
    fn all_ones_is_nobody() {
        assert_eq!(presence(&[0xff; 4]), Some(Presence::FellOff));
        assert_eq!(presence(&[0xde, 0x10, 0xff, 0xff]), Some(Presence::Answers));
        assert_eq!(presence(&[]), None);
    }
}
