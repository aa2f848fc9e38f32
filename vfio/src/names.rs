//! Names in a directory as the kernel hands them over, many at a time and without a copy of each.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

/// Enough for some hundred descriptors in one call.
const BYTES: usize = 16 * 1024;
/// Where a record has its own length, and where its name begins: `struct linux_dirent64` (`include/linux/dirent.h`).
const LENGTH_AT: usize = 16;
const NAME_AT: usize = 19;

/// What `getdents64(2)` writes to: its records begin with a 64-bit number.
#[repr(C, align(8))]
struct Buffer([MaybeUninit<u8>; BYTES]);

/// Calls `use_name` for every name in an open directory, `.` and `..` aside.
pub(crate) fn each_name(dir: BorrowedFd<'_>, mut use_name: impl FnMut(&CStr)) -> io::Result<()> {
    let mut buffer = Buffer([MaybeUninit::uninit(); BYTES]);
    loop {
        // SAFETY: `dir` is an open descriptor, and the kernel writes at most `BYTES` bytes into the buffer.
        let got = unsafe { libc::syscall(libc::SYS_getdents64, dir.as_raw_fd(), buffer.0.as_mut_ptr(), BYTES) };
        let got = usize::try_from(Errno::result(got)?).expect("a length that is no error should not be negative");
        if got == 0 {
            return Ok(());
        }
        // SAFETY: the kernel has written that many bytes.
        let mut records = unsafe { std::slice::from_raw_parts(buffer.0.as_ptr().cast::<u8>(), got) };
        while let Some(length) = records.get(LENGTH_AT..LENGTH_AT + 2) {
            let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
            let Some((record, rest)) = records.split_at_checked(length.max(NAME_AT)) else { break };
            records = rest;
            if let Ok(name) = CStr::from_bytes_until_nul(&record[NAME_AT..])
                && !matches!(name.to_bytes(), b"." | b"..")
            {
                use_name(name);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "lays out what is listed")]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn every_name_is_seen_once_however_many_calls_it_takes() {
        let dir = tempfile::tempdir().unwrap();
        let names: BTreeSet<String> = (0..3000).map(|number| format!("a-name-of-some-length-{number}")).collect();
        for name in &names {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let mut seen = Vec::new();
        let open = File::open(dir.path()).unwrap();
        each_name(open.as_fd(), |name| seen.push(name.to_str().unwrap().to_owned())).unwrap();
        assert_eq!(seen.len(), names.len());
        assert_eq!(seen.into_iter().collect::<BTreeSet<_>>(), names);
    }

    #[test]
    fn what_is_no_directory_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        assert!(each_name(file.as_fd(), |_| {}).is_err());
    }
}
