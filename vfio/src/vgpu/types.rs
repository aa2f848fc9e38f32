//! What the name of a vGPU type says.

/// The last word of the kernel's name: what config files call the type (`NVIDIA RTX Pro 6000 Blackwell DC-48C` is `DC-48C`,
/// `GRID T4-1Q` is `T4-1Q`). A type without a name goes by its directory (`i915-GVTg_V5_4`).
pub fn kind(name: &str) -> &str {
    name.split_ascii_whitespace().next_back().unwrap_or(name)
}

/// A type's name taken apart: `A100-4C` is a share of time, `A100-2-10C` one of two slices of the GPU (MIG).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape<'a> {
    /// Framebuffer in GB; 0 stands for 512 MB (`M60-0Q`).
    pub framebuffer: u32,
    /// Slices of a MIG-backed type; `None`: the type shares the GPU's time.
    pub slices: Option<u32>,
    /// What follows the series: `ME`, `NOME`, `MEALL`, `GFX`, or nothing. Types that differ here are different types.
    pub suffix: &'a str,
}

const SUFFIXES: [&str; 5] = ["", "ME", "NOME", "MEALL", "GFX"];

/// `None`: the name is not made by NVIDIA's rule (board, slices, size, series A, B, C or Q), so nothing is known from it.
pub fn shape(kind: &str) -> Option<Shape<'_>> {
    let (board, last) = kind.rsplit_once('-')?;
    let digits = last.bytes().take_while(u8::is_ascii_digit).count();
    let (size, rest) = last.split_at(digits);
    let suffix = rest.strip_prefix(['A', 'B', 'C', 'Q']).filter(|suffix| SUFFIXES.contains(suffix))?;
    let slices = board.rsplit_once('-').and_then(|(_, slices)| slices.parse().ok());
    let framebuffer = size.parse().ok()?;
    (slices.is_some() || suffix.is_empty()).then_some(Shape { framebuffer, slices, suffix })
}

/// What all types of a board begin with: `RTX6000-Ada` of `RTX6000-Ada-2Q`, `A100` of `A100-2-10C`. `None`: see [`shape`].
pub(super) fn family(kind: &str) -> Option<&str> {
    let shape = shape(kind)?;
    let (board, _) = kind.rsplit_once('-')?;
    if shape.slices.is_some() { Some(board.rsplit_once('-')?.0) } else { Some(board) }
}

/// The GPU instance profile of a MIG-backed type as `nvidia-smi mig` names it: `H100-1-10CME` is on `1g.10gb+me`.
pub fn mig_profile(kind: &str) -> Option<String> {
    let Shape { framebuffer, slices, suffix } = shape(kind)?;
    let extra = match suffix {
        "ME" => "+me",
        "NOME" => "-me",
        "MEALL" => "+me.all",
        "GFX" => "+gfx",
        _ => "",
    };
    Some(format!("{}g.{framebuffer}gb{extra}", slices?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_is_the_type() {
        let names = [
            ("NVIDIA A10-4Q", "A10-4Q"),
            ("GRID P100X-1B", "P100X-1B"),
            ("GRID T4-1Q", "T4-1Q"),
            ("NVIDIA RTX Pro 6000 Blackwell DC-48C", "DC-48C"),
            ("i915-GVTg_V5_4", "i915-GVTg_V5_4"),
        ];
        for (name, expected) in names {
            assert_eq!(kind(name), expected);
        }
    }

    #[test]
    fn a_share_of_time_is_told_from_a_slice_and_suffixes_are_kept() {
        let of = |kind| shape(kind).map(|s| (s.framebuffer, s.slices, s.suffix));
        assert_eq!(of("A16-8Q"), Some((8, None, "")));
        assert_eq!(of("M60-0Q"), Some((0, None, "")));
        assert_eq!(of("RTX6000-Ada-2Q"), Some((2, None, "")));
        assert_eq!(of("A100-1-5CME"), Some((5, Some(1), "ME")));
        assert_eq!(of("DC-1-24CGFX"), Some((24, Some(1), "GFX")));
        for unknown in ["A16-8E", "A100-1-5Cme", "A100-1-5Cab", "A100-5CME", "i915-GVTg_V5_4", "A10", "A10-Q"] {
            assert_eq!(of(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn the_board_is_what_its_types_begin_with() {
        for (kind, board) in [("A100-4C", "A100"), ("A100-2-10CME", "A100"), ("RTX6000-Ada-2Q", "RTX6000-Ada")] {
            assert_eq!(family(kind), Some(board), "{kind}");
        }
        assert_eq!(family("i915-GVTg_V5_4"), None);
    }

    #[test]
    fn the_mig_profile_follows_from_the_type() {
        assert_eq!(mig_profile("A100-2-10C").as_deref(), Some("2g.10gb"));
        assert_eq!(mig_profile("H100-1-10CME").as_deref(), Some("1g.10gb+me"));
        assert_eq!(mig_profile("DC-1-24QGFX").as_deref(), Some("1g.24gb+gfx"));
        assert_eq!(mig_profile("DC-4-96QMEALL").as_deref(), Some("4g.96gb+me.all"));
        assert_eq!(mig_profile("DC-1-24QNOME").as_deref(), Some("1g.24gb-me"));
        assert_eq!(mig_profile("A100-10C"), None);
    }
}
