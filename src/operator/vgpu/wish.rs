//! Which layout a node is to have, and how far it is with it. Pure.

use std::collections::BTreeMap;

use crds::{
    labels,
    v1alpha1::{AgentStatus, GPUStatus, VgpuLayout, VgpuProgress},
};

use super::{
    layouts::{File, LayoutSource},
    resolve::{Resolved, resolve},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// vGPUs are not ours to make here.
    Off,
    /// The file of layouts has not been read.
    NotYet,
    Layout(Resolved),
    /// What was asked last goes on.
    Bad {
        reason: &'static str,
        message: String,
    },
}

/// `file`: what the policy's file of layouts says; `None` while it has not been read.
pub fn wish(
    node: &BTreeMap<String, String>,
    source: Option<&LayoutSource>,
    file: Option<&File>,
    gpus: &[GPUStatus],
) -> Wish {
    let switched_off = node.get(labels::DEPLOY_VGPU_DEVICE_MANAGER).is_some_and(|value| value == "false");
    let Some(source) = source.filter(|_| !switched_off) else { return Wish::Off };
    let label = node.get(labels::VGPU_CONFIG).filter(|name| !name.is_empty());
    let name = label.unwrap_or(&source.default);
    match file {
        None => Wish::NotYet,
        Some(Err(error)) => Wish::Bad { reason: error.reason(), message: error.to_string() },
        Some(Ok(config)) => match resolve(config, name, gpus) {
            Ok(resolved) => Wish::Layout(resolved),
            Err(error) => Wish::Bad { reason: error.reason(), message: error.to_string() },
        },
    }
}

impl Wish {
    /// What is asked of the agent, if it was asked for `last` before.
    pub fn layout(&self, last: Option<&VgpuLayout>) -> Option<VgpuLayout> {
        match self {
            Self::Off => None,
            Self::NotYet | Self::Bad { .. } => last.cloned(),
            Self::Layout(resolved) => Some(resolved.layout.clone()),
        }
    }
}

/// How far a node is with its layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    pub progress: VgpuProgress,
    /// One CamelCase word.
    pub reason: &'static str,
    pub message: String,
}

const PENDING: &str = "VGPULayoutPending";

/// `last` is what the agent was asked for, and `answered` whether its report is about that. `None`: there is no layout.
pub fn standing(wish: &Wish, last: Option<&VgpuLayout>, agent: &AgentStatus, answered: bool) -> Option<Standing> {
    let pending = |message: String| Standing { progress: VgpuProgress::Pending, reason: PENDING, message };
    let (layout, notes) = match (wish, last) {
        (Wish::Off, _) => return None,
        (Wish::NotYet, None) => return Some(pending("the vGPU layouts are being read".to_owned())),
        (Wish::NotYet, Some(last)) => (last, &[][..]),
        (Wish::Bad { reason, message }, last) => {
            let stays = match last {
                Some(last) => format!("{message}; what was asked for last (layout {}) stays", last.name),
                None => message.clone(),
            };
            return Some(Standing { progress: VgpuProgress::Failed, reason, message: stays });
        }
        (Wish::Layout(resolved), _) => (&resolved.layout, resolved.notes.as_slice()),
    };
    let name = &layout.name;
    let waits = || pending(format!("the agent has not answered to vGPU layout {name} yet"));
    if last != Some(layout) || !answered {
        return Some(waits());
    }
    let Some(state) = agent.vgpu.as_ref().filter(|state| state.config == *name) else { return Some(waits()) };
    let said = match state.message.as_str() {
        "" => told(layout),
        message => message.to_owned(),
    };
    let said: Vec<&str> = [said.as_str()].into_iter().chain(notes.iter().map(String::as_str)).collect();
    let message = format!("vGPU layout {name}: {}", said.join("; "));
    let reason = match state.state {
        VgpuProgress::Pending => PENDING,
        VgpuProgress::Success => "VGPULayoutApplied",
        VgpuProgress::Failed => "VGPULayoutFailed",
    };
    Some(Standing { progress: state.state, reason, message })
}

/// `0000:18:00.0 has 6 A10-4Q, …`.
fn told(layout: &VgpuLayout) -> String {
    let gpu = |gpu: &crds::v1alpha1::GPUVgpus| {
        let instances = gpu.instances.iter().map(|instance| format!("{} {}", instance.count, instance.kind));
        let instances: Vec<String> = instances.collect();
        let has = if instances.is_empty() { "none".to_owned() } else { instances.join(" and ") };
        format!("{} has {has}", gpu.address)
    };
    layout.gpus.iter().map(gpu).collect::<Vec<_>>().join(", ")
}

/// Value of the label `nvidia.com/vgpu.config.state`.
pub fn label(progress: VgpuProgress) -> &'static str {
    match progress {
        VgpuProgress::Pending => "pending",
        VgpuProgress::Success => "success",
        VgpuProgress::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use crds::v1alpha1::VgpuState;

    use super::*;
    use crate::operator::vgpu::{Config, layouts::BadFile};

    const GPU: &str = "0000:18:00.0";

    fn source() -> LayoutSource {
        LayoutSource { config_map: Some("mine".to_owned()), default: "small".to_owned() }
    }

    fn config() -> Config {
        let text = "version: v1\nvgpu-configs:\n  small: [{devices: all, vgpu-devices: {T4-1Q: 16}}]\n  large: [{devices: all, vgpu-devices: {T4-8Q: 2}}]\n";
        Config::parse(text).expect("a config")
    }

    fn gpus() -> Vec<GPUStatus> {
        vec![GPUStatus { address: GPU.to_owned(), id: "10de:1eb8".to_owned(), ..GPUStatus::default() }]
    }

    fn labelled(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn wished(node: &[(&str, &str)]) -> Wish {
        wish(&labelled(node), Some(&source()), Some(&Ok(config())), &gpus())
    }

    fn chosen(wish: &Wish) -> Option<String> {
        wish.layout(None).map(|layout| layout.name)
    }

    fn agent(config: &str, state: VgpuProgress, message: &str) -> AgentStatus {
        let vgpu = Some(VgpuState { config: config.to_owned(), state, message: message.to_owned() });
        AgentStatus { vgpu, ..AgentStatus::default() }
    }

    #[test]
    fn the_label_chooses_and_without_one_the_policys_default_holds() {
        assert_eq!(chosen(&wished(&[])).as_deref(), Some("small"));
        assert_eq!(chosen(&wished(&[(labels::VGPU_CONFIG, "")])).as_deref(), Some("small"));
        assert_eq!(chosen(&wished(&[(labels::VGPU_CONFIG, "large")])).as_deref(), Some("large"));
    }

    #[test]
    fn where_vgpus_are_not_ours_none_is_asked_for() {
        assert_eq!(wished(&[(labels::DEPLOY_VGPU_DEVICE_MANAGER, "false")]), Wish::Off);
        assert_eq!(wish(&labelled(&[]), None, Some(&Ok(config())), &gpus()), Wish::Off);
        assert_eq!(standing(&Wish::Off, None, &AgentStatus::default(), true), None);
    }

    #[test]
    fn a_bad_file_or_name_keeps_what_was_asked_for_last_and_says_so() {
        let last = wished(&[]).layout(None);
        let broken: File = Err(BadFile::NotFound { name: "mine".to_owned() });
        for bad in
            [wish(&labelled(&[]), Some(&source()), Some(&broken), &gpus()), wished(&[(labels::VGPU_CONFIG, "gaming")])]
        {
            assert_eq!(bad.layout(last.as_ref()), last);
            assert_eq!(bad.layout(None), None);
            let agent = agent("small", VgpuProgress::Success, "");
            let standing = standing(&bad, last.as_ref(), &agent, true).expect("a standing");
            assert_eq!(standing.progress, VgpuProgress::Failed);
            assert!(standing.message.contains("layout small) stays"), "{}", standing.message);
        }
    }

    #[test]
    fn a_file_that_is_not_read_yet_changes_nothing() {
        let last = wished(&[]).layout(None);
        let unread = wish(&labelled(&[]), Some(&source()), None, &gpus());
        assert_eq!(unread.layout(last.as_ref()), last);
        let agent = agent("small", VgpuProgress::Success, "");
        let told = |last| standing(&unread, last, &agent, true).expect("a standing").progress;
        assert_eq!(told(last.as_ref()), VgpuProgress::Success);
        assert_eq!(told(None), VgpuProgress::Pending);
    }

    #[test]
    fn only_an_answer_to_this_very_layout_counts() {
        let wish = wished(&[]);
        let last = wish.layout(None);
        let done = agent("small", VgpuProgress::Success, "");
        let of = |last, agent: &AgentStatus, answered| standing(&wish, last, agent, answered).expect("a standing");
        let applied = of(last.as_ref(), &done, true);
        assert_eq!((applied.progress, applied.reason), (VgpuProgress::Success, "VGPULayoutApplied"));
        assert!(applied.message.contains(&format!("{GPU} has 16 T4-1Q")), "{}", applied.message);
        assert_eq!(of(last.as_ref(), &done, false).progress, VgpuProgress::Pending, "an older order");
        assert_eq!(of(None, &done, true).progress, VgpuProgress::Pending, "not asked yet");
        let other = agent("large", VgpuProgress::Success, "");
        assert_eq!(of(last.as_ref(), &other, true).progress, VgpuProgress::Pending, "another layout");
        assert_eq!(of(last.as_ref(), &AgentStatus::default(), true).progress, VgpuProgress::Pending);
    }

    #[test]
    fn the_agents_words_are_passed_on() {
        let wish = wished(&[]);
        let failed = agent("small", VgpuProgress::Failed, "vGPU 1 is held by qemu (pid 7)");
        let standing = standing(&wish, wish.layout(None).as_ref(), &failed, true).expect("a standing");
        assert_eq!((standing.progress, standing.reason), (VgpuProgress::Failed, "VGPULayoutFailed"));
        assert!(standing.message.contains("held by qemu (pid 7)"), "{}", standing.message);
    }
}
