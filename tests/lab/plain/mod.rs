//! The same machine without a cluster, booted in seconds: the library's example program and the agent as plain processes.

mod agent;
mod bindings;
mod interrupted;
mod refusals;
mod vgpu;

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs,
    path::PathBuf,
    process,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    node::equipment,
    support::{
        alone::alone,
        cluster::{command, run, script},
    },
};

/// The Quadro with the audio function in its group.
const TWIN: &str = "0000:01:00.0";
const AUDIO: &str = "0000:01:00.1";
/// A GPU with virtual functions; the host's nvme drives it.
const WITH_VFS: &str = "0000:02:00.0";
/// A GPU beside a network card, in one group.
const CROWDED: &str = "0000:06:01.0";
/// GPUs that nothing is special about: T4 and H100, four of each, behind two switches, on two NUMA nodes.
const IDLE: [&str; 8] = [
    "0000:43:00.0",
    "0000:44:00.0",
    "0000:45:00.0",
    "0000:46:00.0",
    "0000:83:00.0",
    "0000:84:00.0",
    "0000:85:00.0",
    "0000:86:00.0",
];

/// For one command in the guest.
const LIMIT: Duration = Duration::from_secs(400);
/// Long enough for a busy machine; nothing waits that long.
const PATIENCE: Duration = Duration::from_secs(60);

static SHARED: OnceLock<Result<Plain, String>> = OnceLock::new();

/// A machine.
struct Plain {
    state: PathBuf,
}

/// What a command said and how it ended.
#[derive(Debug)]
struct Answer {
    code: i32,
    said: String,
    took: Duration,
}

/// Runs a test when no other one runs, on a machine that is as after a boot: no journal, no NVIDIA driver, no vfio-pci.
fn plain(test: impl FnOnce(&Plain) + Send) {
    let run = async || {
        let plain = SHARED.get_or_init(|| Plain::boot(None));
        let plain = plain.as_ref().unwrap_or_else(|error| panic!("no machine: {error}"));
        plain.clean();
        test(plain);
    };
    alone(run, || {
        if let Some(Ok(plain)) = SHARED.get() {
            plain.show();
        }
    });
}

/// As [`plain`], beside whatever else runs, on a machine of its own with these words on the kernel's command line.
fn plain_with(append: &str, test: impl FnOnce(&Plain)) {
    let plain = Plain::boot(Some(append)).unwrap_or_else(|error| panic!("no machine: {error}"));
    test(&plain);
    plain.end();
}

impl Plain {
    fn boot(append: Option<&str>) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let out = equipment("GPUVIRT_LAB", ".cache/gpuvirt/lab");
        let release = equipment("GPUVIRT_RELEASE", "none");
        let release = match release.exists() {
            true => release,
            false => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/release"),
        };
        let programs = [release.join("gpuvirt"), release.join("examples/switch")];
        if let Some(missing) = programs.iter().find(|program| !program.exists()) {
            return Err(format!("{} is not there: tests/run.sh builds both, as does `make build`", missing.display()));
        }
        // Short, and swept if all of us is killed, as a cluster's.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let state = PathBuf::from(format!("/tmp/gpuvirt-{}-{number}", process::id()));
        let owner = OsString::from(process::id().to_string());
        let args = [state.clone()].into_iter().chain(programs);
        let mut environment: Vec<(&str, &OsStr)> = vec![("OUT", out.as_os_str()), ("OWNER", &owner)];
        environment.extend(append.map(|words| ("APPEND", OsStr::new(words))));
        script("tests/lab/plain.sh", args, &environment)?;
        Ok(Self { state })
    }

    /// Boots anew; the disk stays.
    fn reboot(&self) {
        self.run("sync; : >/host/log/times; (usleep 300000; reboot -f) >/dev/null 2>&1 &");
        self.until_on_host("[ -s $0/vm/log/times ] && tests/lab/guest.sh $0 true");
    }

    fn until_on_host(&self, condition: &str) {
        let seconds = PATIENCE.as_secs().to_string();
        let shell = format!("until {condition} >/dev/null 2>&1; do sleep 0.1; done");
        let args = [OsStr::new(&seconds), "bash".as_ref(), "-c".as_ref(), shell.as_ref(), self.state.as_os_str()];
        if let Err(error) = run(&mut command("timeout", args)) {
            panic!("not within {PATIENCE:?}: {condition}: {error}");
        }
    }

    /// Ends before this program does.
    fn end(&self) {
        script("tests/cluster/down.sh", [&self.state], &[]).unwrap_or_else(|error| panic!("{error}"));
        fs::remove_dir_all(&self.state).expect("what is down should be deletable");
    }

    /// A root shell's output; an error with the output if the command fails.
    fn try_run(&self, shell: &str) -> Result<String, String> {
        let seconds = LIMIT.as_secs().to_string();
        let args = [OsStr::new(&seconds), "tests/lab/guest.sh".as_ref(), self.state.as_os_str(), shell.as_ref()];
        run(&mut command("timeout", args))
    }

    fn run(&self, shell: &str) -> String {
        self.try_run(shell).unwrap_or_else(|error| panic!("{error}"))
    }

    fn ask(&self, command: &str) -> Answer {
        let began = Instant::now();
        // Through a file: a process that is left behind keeps its output open.
        let said = self.run(&format!("{command} >/tmp/answer 2>&1; code=$?; cat /tmp/answer; echo \"\u{1}$code\""));
        let (said, code) = said.rsplit_once('\u{1}').expect("a status should follow");
        let code = code.trim().parse().expect("a status should be a number");
        Answer { code, said: said.to_owned(), took: began.elapsed() }
    }

    /// The example program.
    fn switch(&self, binding: &str, gpus: &[&str]) -> Answer {
        self.ask(&format!("switch {binding} {}", gpus.join(" ")))
    }

    /// As [`Self::switch`], which must reach what it is asked for.
    fn switched(&self, binding: &str, gpus: &[&str]) -> Answer {
        let answer = self.switch(binding, gpus);
        assert_eq!(answer.code, 0, "{answer:?}");
        answer
    }

    /// Drivers of all PCI functions, `none` included, as the kernel shows them, read past the product.
    fn drivers(&self) -> BTreeMap<String, String> {
        let said = self.run(
            "for d in /sys/bus/pci/devices/*; do echo ${d##*/} $(basename $(readlink $d/driver || echo none)); done",
        );
        said.lines().filter_map(|line| line.split_once(' ')).map(|(a, d)| (a.to_owned(), d.to_owned())).collect()
    }

    /// Functions that are reserved for a driver.
    fn reserved(&self) -> String {
        self.run("grep -v '(null)' /sys/bus/pci/devices/*/driver_override || true")
    }

    /// Functions in the journal, one a line.
    fn journal(&self) -> String {
        self.run("grep -o '\"0000:[^\"]*\"' /run/gpuvirt/journal || true")
    }

    fn load_nvidia(&self) {
        self.run("modprobe nvidia");
    }

    /// `/dev/nvidiaN` of a GPU.
    fn nvidia_node(&self, gpu: &str) -> String {
        let minor = self.run(&format!(r"sed -n 's/^Device Minor:\s*//p' /proc/driver/nvidia/gpus/{gpu}/information"));
        format!("/dev/nvidia{}", minor.trim())
    }

    /// Starts a process that says something once it is ready; its pid.
    fn start(&self, command: &str) -> String {
        let log = "/tmp/started.log";
        let pid = self.run(&format!(": >{log}; setsid {command} </dev/null >{log} 2>&1 & echo $!"));
        self.until(&format!("[ -s {log} ]"));
        pid.trim().to_owned()
    }

    fn end_process(&self, pid: &str) {
        self.run(&format!("kill {pid}; while [ -d /proc/{pid} ]; do usleep 10000; done"));
    }

    /// Waits in the guest until a command succeeds.
    fn until(&self, condition: &str) {
        let seconds = PATIENCE.as_secs();
        let shell = format!(
            "end=$(($(date +%s) + {seconds})); until {condition}; do [ $(date +%s) -lt $end ] || exit 1; usleep 50000; done"
        );
        if let Err(error) = self.try_run(&shell) {
            panic!("not within {PATIENCE:?}: {condition}: {error}");
        }
    }

    /// Back to what a boot leaves, past the product.
    fn clean(&self) {
        let shell = r#"
            cd /sys/bus/pci
            killall -q -9 gpuvirt switch hide hold kubelet
            [ ! -d /sys/module/nvidia_vgpu_vfio ] || rmmod nvidia_vgpu_vfio
            echo >/sys/module/pciid/parameters/gone
            echo 1 >rescan
            for d in devices/*; do
                [ "$(cat $d/vendor)" = 0x10de ] || continue
                [ ! -s $d/sriov_numvfs ] || [ "$(cat $d/sriov_numvfs)" = 0 ] || echo 0 >$d/sriov_numvfs
                echo >$d/driver_override
                [ ! -e $d/driver ] || case $(basename $(readlink $d/driver)) in
                    nvidia | vfio-pci) echo ${d##*/} >$d/driver/unbind ;;
                esac
            done
            for m in nvidia vfio_pci vfio_pci_core; do [ ! -d /sys/module/$m ] || rmmod $m; done
            for d in 0000:01:00.1 0000:02:00.0; do [ -e devices/$d/driver ] || echo $d >drivers_probe; done
            [ -e devices/0000:02:00.0/driver ] || { echo nvme >devices/0000:02:00.0/driver_override; echo 0000:02:00.0 >drivers/nvme/bind; echo >devices/0000:02:00.0/driver_override; }
            rm -rf /run/gpuvirt /var/lib/gpuvirt /etc/modprobe.d
        "#;
        self.run(shell);
    }

    fn show(&self) {
        let said = self.try_run("gpuvirt inspect; cat /run/gpuvirt/journal; ps | grep -v '\\['; dmesg | tail -20");
        eprintln!("── the machine:\n{}", said.unwrap_or_else(|error| error));
    }
}
