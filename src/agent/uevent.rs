//! Kernel uevents: a reason to look, never a fact.
//!
//! Netlink family `NETLINK_KOBJECT_UEVENT`, group 1. A message that was not sent by the kernel (port 0) is dropped, since
//! any process of the right network namespace can send one. Pods see uevents of PCI devices in every network namespace
//! of the initial user namespace (Linux 4.18, `uevent_net_broadcast_untagged`).

use std::{
    io::{self, IoSliceMut},
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recvmsg, setsockopt, socket, sockopt,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};

use super::readable::readable;

/// Subsystems whose events can change what the agent sees.
const SUBSYSTEMS: [&str; 6] = ["pci", "mdev", "vfio", "vfio-dev", "drivers", "module"];
const KERNEL_GROUP: u32 = 1;
/// A burst at boot must not overflow the socket; an overflow (ENOBUFS) only means "look".
const BUFFER: usize = 1 << 20;

pub struct Uevents(AsyncFd<OwnedFd>);

impl Uevents {
    pub fn open() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Netlink, SockType::Datagram, flags, SockProtocol::NetlinkKObjectUEvent)?;
        setsockopt(&fd, sockopt::RcvBuf, &BUFFER)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, KERNEL_GROUP))?;
        Ok(Self(readable(fd)?))
    }

    /// Notifies for every event that matters; returns only on an error of the socket.
    pub async fn follow(self, due: Arc<Notify>) -> io::Result<()> {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let received = self.0.async_io(Interest::READABLE, |fd| receive(fd, &mut buffer)).await;
            match received {
                Ok(Some(length)) if concerns_us(&buffer[..length]) => due.notify_one(),
                Ok(Some(_) | None) => {}
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => due.notify_one(),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Length of a message from the kernel; `None` for anybody else's.
fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<NetlinkAddr>(fd.as_raw_fd(), &mut parts, None, MsgFlags::MSG_DONTWAIT)?;
    let from_kernel = message.address.is_some_and(|sender| sender.pid() == 0);
    Ok(from_kernel.then_some(message.bytes))
}

/// `ACTION@DEVPATH`, then `KEY=value`, each ended by a NUL.
fn concerns_us(message: &[u8]) -> bool {
    message
        .split(|byte| *byte == 0)
        .filter_map(|part| std::str::from_utf8(part).ok()?.strip_prefix("SUBSYSTEM="))
        .any(|subsystem| SUBSYSTEMS.contains(&subsystem))
}

#[cfg(test)]
mod tests {
    use super::concerns_us;

    #[test]
    fn a_bound_pci_device_concerns_us_and_a_disk_does_not() {
        assert!(concerns_us(b"bind@/devices/pci0000:00/0000:00:01.0\0ACTION=bind\0SUBSYSTEM=pci\0"));
        assert!(!concerns_us(b"add@/devices/virtual/block/loop0\0ACTION=add\0SUBSYSTEM=block\0"));
    }

    #[test]
    fn rubbish_is_no_event() {
        assert!(!concerns_us(b"\xff\xfe\0SUBSYSTEM"));
    }
}
