//! File descriptors that say when there is something to read: the one place that hands them to the runtime.

use std::{io, os::fd::OwnedFd};

use tokio::io::{Interest, unix::AsyncFd};

pub(super) fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned, so it is open and stays what it is until the `AsyncFd` drops it.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.map_err(|error| error.into_parts().1)
}
