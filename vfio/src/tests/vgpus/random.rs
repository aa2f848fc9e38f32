//! Random orders against boards of both frameworks.

use proptest::prelude::*;

use super::{Lab, layout};
use crate::testing::Machine;
use crate::vgpu::{ApplyError, Layout, Vgpu};

const GPU: &str = "0000:26:00.0";
const SIZES: [u32; 6] = [1, 2, 4, 8, 16, 48];

/// Size, series and count of each type.
type Order = Vec<(u32, char, u32)>;

#[derive(Clone, Debug)]
struct Case {
    framework: &'static str,
    vfs: u16,
    heterogeneous: bool,
    /// Each an order, and which of the vGPUs that are there then get a user.
    orders: Vec<(Order, Vec<usize>)>,
}

fn cases() -> impl Strategy<Value = Case> {
    let order =
        prop::collection::vec((prop::sample::select(&SIZES[..]), prop::sample::select(&['Q', 'C'][..]), 0..5u32), 0..3);
    let held = prop::collection::vec(0..8usize, 0..3);
    let framework = prop::sample::select(&["mdev", "vendor"][..]);
    (framework, prop::sample::select(&[0u16, 4, 8][..]), any::<bool>(), prop::collection::vec((order, held), 1..4))
        // The vendor's own framework is one of virtual functions.
        .prop_filter("virtual functions", |(framework, vfs, ..)| *framework == "mdev" || *vfs > 0)
        .prop_map(|(framework, vfs, heterogeneous, orders)| Case { framework, vfs, heterogeneous, orders })
}

fn lab(case: &Case) -> Lab {
    let kinds = SIZES.iter().flat_map(|size| ['Q', 'C'].map(|series| format!("NVIDIA X1-{size}{series}")));
    let types: Vec<String> = kinds.enumerate().map(|(number, name)| format!("{}: {name}", number + 700)).collect();
    let Case { framework, vfs, heterogeneous, .. } = case;
    let possible = if *vfs > 0 { format!("vfs: {vfs}, ") } else { String::new() };
    Lab::of(Machine::from_yaml(&format!(
        "{{ kernel: 6.8.0, os: ubuntu 24.04, loaded: [nvidia_vgpu_vfio], functions: {{ \"{GPU}\": {{ ids: \"10de:26b9 10de:1851\", class: \"030200\", driver: nvidia, group: 47, {possible}board: {{ framework: {framework}, framebuffer: 48, vfs: {vfs}, heterogeneous: {heterogeneous}, types: {{ {} }} }} }} }} }}",
        types.join(", ")
    )))
}

fn wanted(order: &[(u32, char, u32)]) -> Layout {
    let names: Vec<(String, u32)> = order.iter().map(|(size, series, n)| (format!("X1-{size}{series}"), *n)).collect();
    let mut all = layout(&names.iter().map(|(name, n)| (name.as_str(), *n)).collect::<Vec<_>>());
    all.retain(|_, count| *count > 0);
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    #[test]
    fn what_is_in_use_stays_what_fits_stays_and_success_means_that_the_kernel_shows_the_layout(case in cases()) {
        let mut lab = lab(&case);
        let mut held: Vec<Vgpu> = Vec::new();
        for (order, users) in &case.orders {
            let wanted = wanted(order);
            let before = lab.vgpus(GPU);
            let counts_before = lab.counts(GPU);
            let (steps, result) = lab.apply(GPU, &wanted);
            let after = lab.vgpus(GPU);
            for vgpu in &held {
                prop_assert!(after.contains(vgpu), "{vgpu:?} is in use and was changed by {steps:?}");
            }
            // Of each type as many as are in both stay as they are.
            for (kind, count) in &counts_before {
                let stays = wanted.get(kind).copied().unwrap_or(0).min(*count);
                let same = before.iter().filter(|vgpu| vgpu.kind() == Some(kind) && after.contains(vgpu)).count();
                prop_assert!(same >= usize::try_from(stays).unwrap(), "{kind}: {steps:?} {result:?}");
            }
            match result {
                Ok(()) => {
                    prop_assert_eq!(lab.counts(GPU), wanted.clone());
                    let (again, result) = lab.apply(GPU, &wanted);
                    prop_assert!(again.is_empty() && result.is_ok(), "{again:?} {result:?}");
                }
                // What the kernel would refuse is not asked of it.
                Err(ApplyError::Refused(refusal)) => prop_assert!(refusal.to_string().contains(GPU), "{refusal}"),
                Err(error) => prop_assert!(false, "{error}"),
            }
            for user in users {
                if let Some(vgpu) = after.get(*user).filter(|vgpu| !held.contains(vgpu)) {
                    lab.hold(vgpu);
                    held.push(vgpu.clone());
                }
            }
        }
    }
}
