//! Unpacking a module's file where the kernel does not: before Linux 5.17, without `CONFIG_MODULE_DECOMPRESS`, or built for
//! one format and installed with another.

use std::io::{self, Read};
use std::path::Path;

/// More than any module has, packed with debug information.
const LIMIT: usize = 512 << 20;

/// The ELF image in a file named `….ko.xz`, `….ko.zst` or `….ko.gz`.
pub(super) fn image(path: &Path, packed: &[u8]) -> io::Result<Vec<u8>> {
    let format = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match format {
        "xz" => {
            let mut image = Bounded(Vec::new());
            lzma_rs::xz_decompress(&mut &*packed, &mut image).map_err(|error| invalid(format!("{error:?}")))?;
            Ok(image.0)
        }
        "zst" => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(invalid)?;
            let mut image = Vec::new();
            decoder.take(LIMIT as u64 + 1).read_to_end(&mut image)?;
            if image.len() > LIMIT { Err(too_large()) } else { Ok(image) }
        }
        "gz" => gzip(packed),
        _ => Err(invalid(format!("`.{format}` is no format of modules: xz, zst and gz are"))),
    }
}

struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LIMIT {
            return Err(too_large());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// One member (RFC 1952). Its checksum is not looked at: the kernel checks the module's signature, or nothing.
fn gzip(packed: &[u8]) -> io::Result<Vec<u8>> {
    let body = gzip_body(packed).ok_or_else(|| invalid("no gzip file"))?;
    miniz_oxide::inflate::decompress_to_vec_with_limit(body, LIMIT).map_err(|error| invalid(error.to_string()))
}

fn gzip_body(packed: &[u8]) -> Option<&[u8]> {
    let [0x1f, 0x8b, 8, flags, ..] = *packed else { return None };
    let mut rest = packed.get(10..)?;
    if flags & 4 != 0 {
        let extra = usize::from(u16::from_le_bytes([*rest.first()?, *rest.get(1)?]));
        rest = rest.get(2 + extra..)?;
    }
    // Name and comment end with a zero.
    for flag in [8, 16] {
        if flags & flag != 0 {
            let end = rest.iter().position(|byte| *byte == 0)?;
            rest = &rest[end + 1..];
        }
    }
    if flags & 2 != 0 {
        rest = rest.get(2..)?;
    }
    Some(rest)
}

fn too_large() -> io::Error {
    invalid(format!("larger than {LIMIT} bytes when unpacked"))
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `printf 'vfio' |` each program with the options of `scripts/Makefile.modinst`.
    const XZ: &[u8] = &[
        0xfd, 0x37, 0x7a, 0x58, 0x5a, 0x00, 0x00, 0x01, 0x69, 0x22, 0xde, 0x36, 0x02, 0x00, 0x21, 0x01, 0x10, 0x00,
        0x00, 0x00, 0xa8, 0x70, 0x8e, 0x86, 0x01, 0x00, 0x03, 0x76, 0x66, 0x69, 0x6f, 0x00, 0xe9, 0x3b, 0x78, 0x4a,
        0x00, 0x01, 0x18, 0x04, 0x6b, 0xe9, 0xf0, 0xa5, 0x90, 0x42, 0x99, 0x0d, 0x01, 0x00, 0x00, 0x00, 0x00, 0x01,
        0x59, 0x5a,
    ];
    const ZST: &[u8] =
        &[0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x58, 0x21, 0x00, 0x00, 0x76, 0x66, 0x69, 0x6f, 0xbe, 0xdd, 0x7c, 0xdf];
    const GZ: &[u8] = &[
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x03, 0x2b, 0x4b, 0xcb, 0xcc, 0x07, 0x00, 0xe9, 0x3b,
        0x78, 0x4a, 0x04, 0x00, 0x00, 0x00,
    ];

    #[test]
    fn every_format_of_a_distribution_is_unpacked() {
        for (name, packed) in [("vfio.ko.xz", XZ), ("vfio.ko.zst", ZST), ("vfio.ko.gz", GZ)] {
            assert_eq!(image(Path::new(name), packed).unwrap(), b"vfio", "{name}");
        }
    }

    #[test]
    fn what_is_damaged_or_of_another_format_is_an_error() {
        for (name, packed) in [
            ("vfio.ko.xz", &XZ[..XZ.len() / 2]),
            ("vfio.ko.zst", &ZST[..ZST.len() - 2]),
            ("vfio.ko.gz", &GZ[..GZ.len() / 2]),
            ("vfio.ko.xz", GZ),
            ("vfio.ko.zst", XZ),
            ("vfio.ko.gz", ZST),
            ("vfio.ko.gz", b""),
            ("vfio.ko.lz4", GZ),
        ] {
            assert!(image(Path::new(name), packed).is_err(), "{name} {packed:?}");
        }
    }
}
