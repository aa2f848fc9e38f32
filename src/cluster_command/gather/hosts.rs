//! What agents see of their hosts: `gpuvirt gather` in their pods, which takes the right to create `pods/exec` and nothing on
//! the nodes that is not there already.

use std::{
    io::{self, Write},
    time::Duration,
};

use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{AttachParams, AttachedProcess},
};
use serde_json::Value;
use tokio::{io::AsyncReadExt, time::timeout};

use super::{Sink, objects::AgentPod};

/// A look at a host with hanging devices takes a while.
const PATIENCE: Duration = Duration::from_secs(60);
/// Agents that are asked at a time.
const AT_ONCE: usize = 8;
const COMMAND: [&str; 3] = ["/usr/bin/gpuvirt", "gather", "--host-root=/host"];

pub async fn ask<W: Write>(
    client: &Client,
    namespace: &str,
    agents: Vec<AgentPod>,
    sink: &mut Sink<W>,
) -> io::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let asked = agents.into_iter().map(|AgentPod { pod, node }| {
        let pods = pods.clone();
        async move {
            let answer = timeout(PATIENCE, look(&pods, &pod)).await;
            let answer = answer.unwrap_or_else(|_late| Err(format!("pod {pod} has not answered in {PATIENCE:?}")));
            (node, answer)
        }
    });
    let mut answers = stream::iter(asked).buffer_unordered(AT_ONCE);
    while let Some((node, answer)) = answers.next().await {
        let path = format!("nodes/{node}/host.json");
        match answer {
            Ok(mut host) => {
                sink.redactor.object(&mut host);
                let text = serde_json::to_string_pretty(&host).unwrap_or_default();
                sink.archive.add(&path, &text)?;
            }
            Err(why) => sink.missing(&path, &why),
        }
    }
    Ok(())
}

async fn look(pods: &Api<Pod>, pod: &str) -> Result<Value, String> {
    let how = AttachParams::default().container("agent").stdin(false).stdout(true).stderr(true);
    let process = pods.exec(pod, COMMAND, &how).await.map_err(|error| crate::chain(&error))?;
    let (text, said) = output(process).await.map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| match said.trim() {
        "" => format!("pod {pod} has answered no JSON: {error}"),
        said => format!("pod {pod}: {said}"),
    })
}

/// Both at once: one that nobody reads would hold up the other.
async fn output(mut process: AttachedProcess) -> io::Result<(String, String)> {
    let (mut text, mut said) = (String::new(), String::new());
    let (out, err) = (process.stdout(), process.stderr());
    let read_out = async {
        match out {
            Some(mut out) => out.read_to_string(&mut text).await,
            None => Ok(0),
        }
    };
    let read_err = async {
        match err {
            Some(mut err) => err.read_to_string(&mut said).await,
            None => Ok(0),
        }
    };
    tokio::try_join!(read_out, read_err)?;
    Ok((text, said))
}
