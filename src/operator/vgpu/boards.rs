//! Boards that NVIDIA's vGPU host driver cuts, their types, and how many of one type fit on one GPU. Pure.
//!
//! Type names and counts: NVIDIA's vGPU user guide, "Virtual GPU Types for Supported GPUs". Device ids: the PCI id list.
//! What the kernel lists on a node counts more: this is for layouts that are written before a node is there.

/// One type of a family, without the family's name, and how many of it a GPU has.
pub type Size = (&'static str, u8);

/// GPUs that are cut alike and have their types named alike.
pub struct Board {
    /// First part of its types' names. Two boards may share it.
    pub family: &'static str,
    /// Device ids of NVIDIA, and what each is.
    pub ids: &'static [(u16, &'static str)],
    /// Where another board has the same device id.
    pub subsystem: Option<u16>,
    /// Of the framebuffer, in GB.
    pub memory: u32,
    pub sizes: &'static [Size],
    /// What a node gets that names no layout.
    pub usual: Size,
}

const fn board(
    family: &'static str,
    ids: &'static [(u16, &'static str)],
    subsystem: Option<u16>,
    memory: u32,
    sizes: &'static [Size],
    usual: Size,
) -> Board {
    Board { family, ids, subsystem, memory, sizes, usual }
}

// Tables are read by rows, so they are left as they are written.
#[rustfmt::skip]
const GB24: &[Size] = &[
    ("1Q", 24), ("2Q", 12), ("3Q", 8), ("4C", 6), ("4Q", 6), ("6C", 4), ("6Q", 4), ("8C", 3), ("8Q", 3), ("12C", 2),
    ("12Q", 2), ("24C", 1), ("24Q", 1),
];
#[rustfmt::skip]
const A100_40: &[Size] = &[
    ("1-5C", 7), ("1-5CME", 1), ("1-10C", 4), ("2-10C", 3), ("3-20C", 2), ("4C", 10), ("4-20C", 1), ("5C", 8),
    ("7-40C", 1), ("8C", 5), ("10C", 4), ("20C", 2), ("40C", 1),
];
#[rustfmt::skip]
const A100_80: &[Size] = &[
    ("1-10C", 7), ("1-10CME", 1), ("1-20C", 4), ("2-20C", 3), ("3-40C", 2), ("4C", 20), ("4-40C", 1), ("7-80C", 1),
    ("8C", 10), ("10C", 8), ("16C", 5), ("20C", 4), ("40C", 2), ("80C", 1),
];
#[rustfmt::skip]
const GB16: &[Size] = &[
    ("1Q", 16), ("2Q", 8), ("4C", 4), ("4Q", 4), ("8C", 2), ("8Q", 2), ("16C", 1), ("16Q", 1),
];
#[rustfmt::skip]
const A30: &[Size] = &[
    ("1-6C", 4), ("1-6CME", 1), ("2-12C", 2), ("2-12CME", 1), ("4C", 6), ("4-24C", 1), ("6C", 4), ("8C", 3),
    ("12C", 2), ("24C", 1),
];
#[rustfmt::skip]
const GB48: &[Size] = &[
    ("1Q", 32), ("2Q", 24), ("3Q", 16), ("4C", 12), ("4Q", 12), ("6C", 8), ("6Q", 8), ("8C", 6), ("8Q", 6),
    ("12C", 4), ("12Q", 4), ("16C", 3), ("16Q", 3), ("24C", 2), ("24Q", 2), ("48C", 1), ("48Q", 1),
];
#[rustfmt::skip]
const B200: &[Size] = &[
    ("1-23C", 7), ("1-23CME", 1), ("1-45C", 4), ("2-45C", 3), ("3-90C", 2), ("4-90C", 1), ("7-180C", 1), ("180C", 1),
];
#[rustfmt::skip]
const B300: &[Size] = &[
    ("1-34C", 7), ("1-34CME", 1), ("1-67C", 4), ("2-67C", 3), ("3-135C", 2), ("4-135C", 1), ("7-269C", 1),
    ("269C", 1),
];
#[rustfmt::skip]
const GB200: &[Size] = &[
    ("1-24C", 7), ("1-24CME", 1), ("1-47C", 4), ("2-47C", 3), ("3-95C", 2), ("4-95C", 1), ("7-189C", 1), ("189C", 1),
];
#[rustfmt::skip]
const GH200_96: &[Size] = &[
    ("1-12C", 7), ("1-12CME", 1), ("1-24C", 4), ("2-24C", 3), ("3-48C", 2), ("4-48C", 1), ("7-96C", 1), ("96C", 1),
];
#[rustfmt::skip]
const GH200_144: &[Size] = &[
    ("1-18C", 7), ("1-18CME", 1), ("1-36C", 4), ("2-36C", 3), ("3-72C", 2), ("4-72C", 1), ("7-144C", 1), ("144C", 1),
];
#[rustfmt::skip]
const H100_80: &[Size] = &[
    ("1-10C", 7), ("1-10CME", 1), ("1-20C", 4), ("2-20C", 3), ("3-40C", 2), ("4C", 20), ("4-40C", 1), ("5C", 16),
    ("7-80C", 1), ("8C", 10), ("10C", 8), ("16C", 5), ("20C", 4), ("40C", 2), ("80C", 1),
];
#[rustfmt::skip]
const H100_94: &[Size] = &[
    ("1-12C", 7), ("1-12CME", 1), ("1-24C", 4), ("2-24C", 3), ("3-47C", 2), ("4C", 23), ("4-47C", 1), ("6C", 15),
    ("7-94C", 1), ("11C", 8), ("15C", 6), ("23C", 4), ("47C", 2), ("94C", 1),
];
#[rustfmt::skip]
const H100_64: &[Size] = &[
    ("1-8C", 7), ("1-8CME", 1), ("1-16C", 4), ("2-16C", 3), ("3-32C", 2), ("4C", 16), ("4-32C", 1), ("7-64C", 1),
    ("8C", 8), ("16C", 4), ("32C", 2), ("64C", 1),
];
#[rustfmt::skip]
const H20: &[Size] = &[
    ("1-12C", 7), ("1-12CME", 1), ("1-24C", 4), ("2-24C", 3), ("3-48C", 2), ("4C", 24), ("4-48C", 1), ("6C", 16),
    ("7-96C", 1), ("8C", 12), ("12C", 8), ("16C", 6), ("24C", 4), ("32C", 3), ("48C", 2), ("96C", 1),
];
#[rustfmt::skip]
const H200: &[Size] = &[
    ("1-18C", 7), ("1-18CME", 1), ("1-35C", 4), ("2-35C", 3), ("3-71C", 2), ("4C", 32), ("4-71C", 1), ("7C", 20),
    ("7-141C", 1), ("8C", 16), ("14C", 10), ("17C", 8), ("28C", 5), ("35C", 4), ("70C", 2), ("141C", 1),
];
#[rustfmt::skip]
const GB32: &[Size] = &[
    ("1Q", 32), ("2Q", 16), ("4C", 8), ("4Q", 8), ("8C", 4), ("8Q", 4), ("16C", 2), ("16Q", 2), ("32C", 1),
    ("32Q", 1),
];
#[rustfmt::skip]
const RTX8000: &[Size] = &[
    ("1Q", 32), ("2Q", 24), ("3Q", 16), ("4C", 8), ("4Q", 12), ("6C", 8), ("6Q", 8), ("8C", 6), ("8Q", 6), ("12C", 4),
    ("12Q", 4), ("16C", 3), ("16Q", 3), ("24C", 2), ("24Q", 2), ("48C", 1), ("48Q", 1),
];
#[rustfmt::skip]
const RTX6000D: &[Size] = &[
    ("1-42C", 2), ("1-42Q", 2), ("2-84C", 1), ("2-84Q", 1), ("84C", 1), ("84Q", 1), ("1-42CGFX", 2), ("1-42QGFX", 2),
    ("2-84CGFX", 1), ("2-84QGFX", 1),
];
#[rustfmt::skip]
const RTX_PRO_96: &[Size] = &[
    ("1-2Q", 48), ("1-3Q", 32), ("1-4Q", 24), ("1-6Q", 16), ("1-8C", 12), ("1-8Q", 12), ("1-12C", 8), ("1-12Q", 8),
    ("1-24C", 4), ("1-24Q", 4), ("2-12C", 8), ("2-12Q", 8), ("2-16C", 6), ("2-16Q", 6), ("2-24C", 4), ("2-24Q", 4),
    ("2-48C", 2), ("2-48Q", 2), ("3Q", 32), ("4Q", 24), ("4-24C", 4), ("4-24Q", 4), ("4-32C", 3), ("4-32Q", 3),
    ("4-48C", 2), ("4-48Q", 2), ("4-96C", 1), ("4-96Q", 1), ("6Q", 16), ("8C", 12), ("8Q", 12), ("12C", 8),
    ("12Q", 8), ("16C", 6), ("16Q", 6), ("24C", 4), ("24Q", 4), ("32C", 3), ("32Q", 3), ("48C", 2), ("48Q", 2),
    ("96C", 1), ("96Q", 1), ("1-2QGFX", 48), ("1-3QGFX", 32), ("1-4QGFX", 24), ("1-6QGFX", 16), ("1-8CGFX", 12),
    ("1-8QGFX", 12), ("1-12CGFX", 8), ("1-12QGFX", 8), ("1-24CGFX", 4), ("1-24QGFX", 4), ("2-12CGFX", 8),
    ("2-12QGFX", 8), ("2-16CGFX", 6), ("2-16QGFX", 6), ("2-24CGFX", 4), ("2-24QGFX", 4), ("2-48CGFX", 2),
    ("2-48QGFX", 2), ("4-24CGFX", 4), ("4-24QGFX", 4), ("4-32CGFX", 3), ("4-32QGFX", 3), ("4-48CGFX", 2),
    ("4-48QGFX", 2), ("4-96CGFX", 1), ("4-96QGFX", 1),
];
#[rustfmt::skip]
const RTX_PRO_32: &[Size] = &[
    ("1-16C", 2), ("1-16Q", 2), ("2-8C", 4), ("2-8Q", 4), ("2-32C", 1), ("2-32Q", 1), ("4Q", 8), ("8C", 4), ("8Q", 4),
    ("16C", 2), ("16Q", 2), ("32C", 1), ("32Q", 1),
];

#[rustfmt::skip]
pub const BOARDS: &[Board] = &[
    board("V100X", &[(0x1db1, "Tesla V100 SXM2 16GB")], None, 16, GB16, ("8Q", 2)),
    board("V100L", &[(0x1db3, "Tesla V100 FHHL 16GB")], None, 16, GB16, ("8Q", 2)),
    board("V100", &[(0x1db4, "Tesla V100 PCIe 16GB")], None, 16, GB16, ("8Q", 2)),
    board("V100DX", &[(0x1db5, "Tesla V100 SXM2 32GB")], None, 32, GB32, ("16Q", 2)),
    board("V100D", &[(0x1db6, "Tesla V100 PCIe 32GB")], None, 32, GB32, ("16Q", 2)),
    board("V100S", &[(0x1df6, "Tesla V100S PCIe 32GB")], None, 32, GB32, ("16Q", 2)),
    board("RTX6000P", &[(0x1e78, "Quadro RTX 6000")], Some(0x13d9), 24, GB24, ("12Q", 2)),
    board("RTX8000P", &[(0x1e78, "Quadro RTX 8000")], Some(0x13d8), 48, RTX8000, ("24Q", 2)),
    board("T4", &[(0x1eb8, "Tesla T4")], None, 16, GB16, ("8Q", 2)),
    board("A100X", &[(0x20b0, "A100 SXM4 40GB")], None, 40, A100_40, ("20C", 2)),
    board("A100DX", &[(0x20b2, "A100 SXM4 80GB")], None, 80, A100_80, ("40C", 2)),
    board("A100D", &[(0x20b5, "A100 PCIe 80GB"), (0x20b8, "A100X")], None, 80, A100_80, ("40C", 2)),
    board("A30", &[(0x20b7, "A30 PCIe"), (0x20b9, "A30X")], None, 24, A30, ("12C", 2)),
    board("A100", &[(0x20f1, "A100 PCIe 40GB")], None, 40, A100_40, ("20C", 2)),
    board("A800DX", &[(0x20f3, "A800-SXM4-80GB")], None, 80, A100_80, ("40C", 2)),
    board("A800D", &[(0x20f5, "A800 80GB PCIe"), (0x20fd, "AX800")], None, 80, A100_80, ("40C", 2)),
    board("A800", &[(0x20f6, "A800 40GB PCIe")], None, 40, A100_40, ("20C", 2)),
    board("RTXA6000", &[(0x2230, "RTX A6000")], None, 48, GB48, ("24Q", 2)),
    board("RTXA5000", &[(0x2231, "RTX A5000")], None, 24, GB24, ("12Q", 2)),
    board("RTXA5500", &[(0x2233, "RTX A5500")], None, 24, GB24, ("12Q", 2)),
    board("A40", &[(0x2235, "A40")], None, 48, GB48, ("24Q", 2)),
    board("A10", &[(0x2236, "A10")], None, 24, GB24, ("12Q", 2)),
    board("H100L", &[(0x2321, "H100L 94GB")], None, 94, H100_94, ("47C", 2)),
    board("H800", &[(0x2322, "H800 PCIe")], None, 80, H100_80, ("40C", 2)),
    board("H800XM", &[(0x2324, "H800")], None, 80, H100_80, ("40C", 2)),
    board("H20", &[(0x2329, "H20")], None, 96, H20, ("48C", 2)),
    board("H20X", &[(0x232c, "H20 HBM3e")], None, 141, H200, ("70C", 2)),
    board("H100XM", &[(0x2330, "H100 SXM5 80GB"), (0x2336, "H100")], None, 80, H100_80, ("40C", 2)),
    board("H100", &[(0x2331, "H100 PCIe")], None, 80, H100_80, ("40C", 2)),
    board("H200X", &[(0x2335, "H200 SXM 141GB")], None, 141, H200, ("70C", 2)),
    board("H100XS", &[(0x2337, "H100 SXM5 64GB")], None, 64, H100_64, ("32C", 2)),
    board("H100XL", &[(0x2339, "H100 SXM5 94GB")], None, 94, H100_94, ("47C", 2)),
    board("H800L", &[(0x233a, "H800L 94GB")], None, 94, H100_94, ("47C", 2)),
    board("H200", &[(0x233b, "H200 NVL")], None, 141, H200, ("70C", 2)),
    board("GH200", &[(0x2342, "GH200 120GB / 480GB")], None, 96, GH200_96, ("96C", 1)),
    board("GH200L", &[(0x2348, "GH200 144G HBM3e")], None, 144, GH200_144, ("144C", 1)),
    board("A16", &[(0x25b6, "A16")], Some(0x14a9), 16, GB16, ("8Q", 2)),
    board("A2", &[(0x25b6, "A2")], Some(0x157e), 16, GB16, ("8Q", 2)),
    board("RTX6000-Ada", &[(0x26b1, "RTX 6000 Ada Generation")], None, 48, GB48, ("24Q", 2)),
    board("RTX5000-Ada", &[(0x26b2, "RTX 5000 Ada Generation")], None, 32, GB32, ("16Q", 2)),
    board("RTX5880-Ada", &[(0x26b3, "RTX 5880 Ada Generation")], None, 48, GB48, ("24Q", 2)),
    board("L40", &[(0x26b5, "L40")], None, 48, GB48, ("24Q", 2)),
    board("L40S", &[(0x26b9, "L40S")], None, 48, GB48, ("24Q", 2)),
    board("L20", &[(0x26ba, "L20")], None, 48, GB48, ("24Q", 2)),
    board("L2", &[(0x27b6, "L2")], None, 24, GB24, ("12Q", 2)),
    board("L4", &[(0x27b8, "L4")], None, 24, GB24, ("12Q", 2)),
    board("B200X", &[(0x2901, "B200")], None, 180, B200, ("180C", 1)),
    board("GB200", &[(0x2941, "HGX GB200")], None, 189, GB200, ("189C", 1)),
    board("DC", &[(0x2bb5, "RTX PRO 6000 Blackwell Server Edition")], None, 96, RTX_PRO_96, ("48Q", 2)),
    board("6000D", &[(0x2bb9, "RTX 6000D")], None, 84, RTX6000D, ("84Q", 1)),
    board("DC", &[(0x2c3a, "RTX PRO Blackwell Server Edition 32GB")], None, 32, RTX_PRO_32, ("16Q", 2)),
    board("B300X", &[(0x3182, "B300")], None, 269, B300, ("269C", 1)),
];
