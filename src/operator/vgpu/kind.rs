//! Names of vGPU types, as NVIDIA's host driver has them: `A10-4Q`, `A100-1-5CME`, `RTX6000-Ada-2Q`. Pure.

use std::{fmt, str::FromStr};

/// How a type gets its part of the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// By time slices of the whole GPU.
    Time,
    /// By a MIG instance.
    Mig,
}

/// A name that follows the grammar of vGPU types. Suffixes (`ME`, `NOME`, `MEALL`, `GFX`) are part of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VgpuType(String);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "is no vGPU type: names are like A10-4Q or, with MIG, like A100-1-5C or A100-1-5CME (upper case, series A, B, C or Q)"
)]
pub struct NotAType;

const SUFFIXES: [&str; 5] = ["", "ME", "NOME", "MEALL", "GFX"];

impl VgpuType {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn backing(&self) -> Backing {
        match time_sliced(&self.0) {
            true => Backing::Time,
            false => Backing::Mig,
        }
    }
}

impl FromStr for VgpuType {
    type Err = NotAType;

    fn from_str(text: &str) -> Result<Self, NotAType> {
        (time_sliced(text) || mig_backed(text)).then(|| Self(text.to_owned())).ok_or(NotAType)
    }
}

impl fmt::Display for VgpuType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Board, words (`Ada`), memory in GB with the series: `RTX6000-Ada-2Q`. Zero is 512 MB, as in `M60-0Q`.
fn time_sliced(text: &str) -> bool {
    let mut parts = text.split('-');
    let (Some(board), Some(last)) = (parts.next(), parts.next_back()) else { return false };
    let Some(memory) = series(last) else { return false };
    let words = parts.all(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphabetic()));
    is_board(board) && words && is_number(memory) && (memory == "0" || !memory.starts_with('0'))
}

/// Board, slices, memory with the series and perhaps a suffix: `A100-1-5CME`.
fn mig_backed(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let &[board, slices, last] = parts.as_slice() else { return false };
    let slices = matches!(slices.as_bytes(), [b'1'..=b'9']);
    let memory = SUFFIXES.iter().find_map(|suffix| series(last.strip_suffix(suffix)?));
    is_board(board) && slices && memory.is_some_and(is_number)
}

/// Without its series' letter.
fn series(text: &str) -> Option<&str> {
    text.strip_suffix(['A', 'B', 'C', 'Q'])
}

fn is_board(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn backing(text: &str) -> Option<Backing> {
        text.parse::<VgpuType>().ok().map(|kind| kind.backing())
    }

    #[test]
    fn names_of_both_kinds_are_told_apart() {
        for name in ["A16-8Q", "RTX6000-Ada-2Q", "M60-0Q", "T4-1B", "L40S-48A", "H100L-11C", "6000D-84C"] {
            assert_eq!(backing(name), Some(Backing::Time), "{name}");
        }
        for name in ["A100-1-5C", "A100-1-5CME", "DC-1-24CGFX", "B200X-7-180C", "A30-2-12CNOME", "A30-2-12CMEALL"] {
            assert_eq!(backing(name), Some(Backing::Mig), "{name}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let wrong = [
            "",
            "A16",
            "A16-",
            "-8Q",
            "A16-8E",
            "A16-8",
            "A16-Q",
            "A16-08Q",
            "a16-8Q",
            " A100-5C",
            "A100 -5C",
            "A100-5C ",
            "A100-1-5Cme",
            "A100-1-5C ME",
            "A100-1-5Cab",
            "A100-0-5C",
            "A100-10-5C",
            "A100-1-C",
            "A100-5CME",
            "A100--5C",
            "RTX6000-Ada-1-2Q",
            "NVIDIA A10-4Q",
            "A10-4Q\n",
        ];
        for name in wrong {
            assert_eq!(backing(name), None, "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn a_name_is_kept_as_it_is_written(text in "[A-Z0-9]{1,6}(-[1-9])?-[1-9][0-9]{0,2}[ABCQ]") {
            prop_assert_eq!(text.parse::<VgpuType>().expect("a name").to_string(), text);
        }

        #[test]
        fn no_text_makes_it_panic(text in any::<String>()) {
            let _any = text.parse::<VgpuType>();
        }
    }
}
