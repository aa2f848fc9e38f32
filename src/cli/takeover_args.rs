//! Arguments of `gpuvirt takeover`.

use std::time::Duration;

use clap::Args;

use crate::takeover::{Direction, Options};

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub(super) struct TakeoverArgs {
    /// Prints what is there, what would be adopted, roll and stay, and what stands in the way. Exits with 2 if something does.
    #[arg(long, required_unless_present = "apply", conflicts_with = "apply")]
    plan: bool,
    /// Does it. Run again, it goes on where it was interrupted.
    #[arg(long)]
    apply: bool,
    /// The other way: gives the cluster back to NVIDIA's operator.
    #[arg(long)]
    back: bool,
    /// Go on although workloads are disturbed as the plan says.
    #[arg(long, requires = "apply")]
    accept_disruption: bool,
    /// Where NVIDIA's operator is, if it is not to be looked for.
    #[arg(short, long)]
    namespace: Option<String>,
    /// As in `90s` or `5m`.
    #[arg(long, default_value = "5m", value_parser = super::duration)]
    timeout: Duration,
}

impl From<TakeoverArgs> for Options {
    fn from(args: TakeoverArgs) -> Self {
        Self {
            direction: if args.back { Direction::GiveBack } else { Direction::Take },
            apply: args.apply,
            accept_disruption: args.accept_disruption,
            namespace: args.namespace,
            timeout: args.timeout,
        }
    }
}
