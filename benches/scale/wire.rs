//! The operator's way to the API server, on which its bytes are counted.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Bytes, TLS and all.
#[derive(Default)]
pub struct Bytes {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Bytes {
    /// Sent by the operator, and received.
    pub fn now(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }
}

/// A copy of the kubeconfig whose server is this process, which hands everything on.
pub async fn through(kubeconfig: &Path) -> (PathBuf, Arc<Bytes>) {
    let text = std::fs::read_to_string(kubeconfig).expect("the kubeconfig should be readable");
    let mut config: serde_json::Value = serde_saphyr::from_str(&text).expect("the kubeconfig should be YAML");
    let server = config["clusters"][0]["cluster"]["server"].as_str().expect("a server").to_owned();
    let server = server.trim_start_matches("https://").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port should be free");
    let own = listener.local_addr().expect("a listener should have an address");
    config["clusters"][0]["cluster"]["server"] = format!("https://{own}").into();
    let path = kubeconfig.with_extension("counted");
    std::fs::write(&path, config.to_string()).expect("a kubeconfig should be writable");
    let bytes = Arc::new(Bytes::default());
    let counted = bytes.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(hand_on(client, server.clone(), counted.clone()));
        }
    });
    (path, bytes)
}

async fn hand_on(client: TcpStream, server: String, bytes: Arc<Bytes>) -> io::Result<()> {
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    tokio::try_join!(copy(from_client, to_server, &bytes.sent), copy(from_server, to_client, &bytes.received)).map(drop)
}

async fn copy(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    count: &AtomicU64,
) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return to.shutdown().await;
        }
        count.fetch_add(length as u64, Ordering::Relaxed);
        to.write_all(&buffer[..length]).await?;
    }
}
