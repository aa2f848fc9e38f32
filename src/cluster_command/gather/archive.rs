//! A gzipped tar file, written as its parts come. The format is POSIX ustar (IEEE Std 1003.1, `pax`).

use std::io::{self, Write};

use flate2::{Compression, write::GzEncoder};

const BLOCK: usize = 512;

pub struct Archive<W: Write> {
    out: GzEncoder<W>,
    /// Folder that everything is in.
    root: String,
    /// Seconds since 1970, for every file.
    time: i64,
    pub files: usize,
}

impl<W: Write> Archive<W> {
    pub fn new(out: W, root: &str, time: i64) -> Self {
        Self { out: GzEncoder::new(out, Compression::default()), root: root.to_owned(), time, files: 0 }
    }

    pub fn add(&mut self, path: &str, text: &str) -> io::Result<()> {
        let size = text.len();
        self.out.write_all(&header(&format!("{}/{path}", self.root), size, self.time)?)?;
        self.out.write_all(text.as_bytes())?;
        self.out.write_all(&vec![0; size.next_multiple_of(BLOCK) - size])?;
        self.files += 1;
        Ok(())
    }

    /// Writes the end; two empty blocks.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK])?;
        self.out.finish()
    }
}

/// Of a plain file that its owner may read: what is in it is not for everybody.
fn header(path: &str, size: usize, time: i64) -> io::Result<[u8; BLOCK]> {
    let (prefix, name) = split(path)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("{path} is too long for a tar file")))?;
    let mut block = [0; BLOCK];
    let mut put = |at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000600\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{size:011o}\0"));
    put(136, &format!("{time:011o}\0"));
    // The sum is made with spaces in its own place.
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    put(345, prefix);
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(block)
}

/// At a slash, into at most 155 and 100 bytes.
fn split(path: &str) -> Option<(&str, &str)> {
    if path.len() <= 100 {
        return Some(("", path));
    }
    let cuts = path.match_indices('/').map(|(at, _)| (&path[..at], &path[at + 1..]));
    cuts.into_iter().find(|(prefix, name)| prefix.len() <= 155 && name.len() <= 100)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Names and contents, as the format has them.
    fn read(bytes: &[u8]) -> Vec<(String, String)> {
        let mut all = Vec::new();
        flate2::read::GzDecoder::new(bytes).read_to_end(&mut all).expect("gzip");
        let mut files = Vec::new();
        let mut rest = all.as_slice();
        while rest[0] != 0 {
            let text =
                |range: std::ops::Range<usize>| String::from_utf8_lossy(&rest[range]).trim_end_matches('\0').to_owned();
            let (name, prefix) = (text(0..100), text(345..500));
            let size = usize::from_str_radix(&text(124..135), 8).expect("a size");
            let content = String::from_utf8_lossy(&rest[BLOCK..BLOCK + size]).into_owned();
            files.push((if prefix.is_empty() { name } else { format!("{prefix}/{name}") }, content));
            rest = &rest[BLOCK + size.next_multiple_of(BLOCK)..];
        }
        assert_eq!(rest, [0; 2 * BLOCK]);
        files
    }

    #[test]
    fn what_goes_in_comes_out() {
        let mut archive = Archive::new(Vec::new(), "root", 1_700_000_000);
        let long = format!("{}/{}", "d".repeat(90), "f".repeat(80));
        archive.add("a.txt", "one").expect("written");
        archive.add(&long, &"x".repeat(BLOCK)).expect("written");
        assert!(archive.add(&"n".repeat(200), "").is_err());
        let files = read(&archive.finish().expect("an end"));
        assert_eq!(files, [("root/a.txt".to_owned(), "one".to_owned()), (format!("root/{long}"), "x".repeat(BLOCK)),]);
    }
}
