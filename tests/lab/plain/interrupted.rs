//! Writes that hang, and death at any moment.

use std::time::Duration;

use super::{AUDIO, IDLE, TWIN, plain};

/// Far more than a look and a refusal take, and less than a write's deadline on top of them.
const AT_ONCE: Duration = Duration::from_secs(5);

#[test]
fn an_unbind_that_hangs_is_given_up_in_time_and_others_are_served_and_it_is_finished_when_the_user_lets_go() {
    plain(|plain| {
        plain.load_nvidia();
        let [busy, second, third, ..] = IDLE;
        let node = plain.nvidia_node(busy);
        // Opened, and no process is seen to have it: as a program that opens it after the last look.
        let user = plain.start(&format!("hide {node}"));
        let answer = plain.switch("vfio", &[busy, second]);
        assert_eq!(answer.code, 2, "{answer:?}");
        let given_up = format!(
            "could not take {busy} from nvidia: /sys/bus/pci/drivers/nvidia/unbind: the write has not come back after 5 s"
        );
        assert!(answer.said.contains(&given_up) && answer.said.contains("waits in remove"), "{answer:?}");
        assert_eq!(plain.drivers()[second], "vfio-pci", "served, after it: {answer:?}");

        // Anew, and from the journal: the hanging one is not asked, and does not hold the others up.
        let answer = plain.switch("vfio", &[busy, third]);
        assert!(answer.code == 2 && answer.said.contains(&format!("WriteHanging: gpu {busy}")), "{answer:?}");
        assert!(answer.took < AT_ONCE, "{answer:?}");
        assert_eq!(plain.drivers()[third], "vfio-pci");
        let inspected = plain.ask("gpuvirt inspect");
        assert!(inspected.said.contains("WriteHanging") && inspected.took < AT_ONCE, "{inspected:?}");

        plain.end_process(&user);
        plain.switched("vfio", &[busy]);
        plain.switched("host", &[busy, second, third]);
        assert_eq!(plain.drivers()[busy], "nvidia", "the journal knew where it came from");
    });
}

#[test]
fn death_while_an_unbind_hangs_does_not_make_the_next_one_hang() {
    plain(|plain| {
        plain.load_nvidia();
        let [busy, other, ..] = IDLE;
        let user = plain.start(&format!("hide {}", plain.nvidia_node(busy)));
        plain.run(&format!("setsid switch vfio {busy} </dev/null >/tmp/first.log 2>&1 &"));
        // The child is in the write; what was started first has the lower pid.
        plain.until("grep -qsx remove /proc/$(pidof switch | tr ' ' '\\n' | sort -n | tail -1)/wchan");
        plain.run("kill -9 $(pidof switch | tr ' ' '\\n' | sort -n | head -1)");
        let answer = plain.switch("vfio", &[busy, other]);
        assert!(answer.code == 2 && answer.said.contains(&format!("WriteHanging: gpu {busy}")), "{answer:?}");
        assert_eq!(plain.drivers()[other], "vfio-pci", "{answer:?}");
        plain.end_process(&user);
        plain.until(&format!("switch vfio {busy}"));
        plain.switched("host", &[busy, other]);
        assert_eq!(plain.drivers()[busy], "nvidia");
    });
}

/// Runs a switch that is killed before its first change, then one before its second, and so on until one is through. Each
/// time either the same switch or its opposite must repair all that is left.
const KILLED_EVERYWHERE: &str = r#"
    drivers() { for d in /sys/bus/pci/devices/0000:01:00.?; do echo $(basename $(readlink $d/driver || echo none)) $(cat $d/driver_override); done | xargs; }
    settled() { # BINDING
        switch $1 $GPU >/tmp/out || { echo "died at $n of $way, then $1: $(cat /tmp/out)"; exit 1; }
        case $1 in
        host) [ "$(drivers)" = "$HOME_DRIVERS" ] && ! grep -q '"0000:' /run/gpuvirt/journal ;;
        vfio) [ "$(drivers)" = "vfio-pci vfio-pci vfio-pci vfio-pci" ] ;;
        esac || { echo "died at $n of $way, then $1: $(drivers)"; cat /run/gpuvirt/journal; exit 1; }
    }
    HOME_DRIVERS=$(drivers)
    for way in vfio host; do
        case $way in vfio) back=host ;; host) back=vfio ;; esac
        [ $way = vfio ] || switch $back $GPU >/dev/null
        n=0
        while n=$((n + 1)); do
            [ $way = host ] || rmmod vfio_pci vfio_pci_core irqbypass 2>/dev/null
            killat $n switch $way $GPU >/dev/null
            died=$?
            [ $((n % 2)) = 0 ] || settled $way
            settled $back
            [ $died = 137 ] || break
        done
        [ $died = 0 ] || { echo "$way: $died"; exit 1; }
        echo "$way $((n - 1))"
    done
"#;

#[test]
fn death_before_any_change_is_repaired_by_the_same_order_and_by_the_opposite_one() {
    plain(|plain| {
        plain.load_nvidia();
        assert_eq!(plain.drivers()[AUDIO], "snd_hda_intel");
        let said = plain.run(&format!("GPU={TWIN}; {KILLED_EVERYWHERE}"));
        eprintln!("changes: {said}");
        for way in said.lines() {
            let changes: u32 = way.split(' ').nth(1).and_then(|number| number.parse().ok()).expect("a number");
            assert!(changes >= 12, "each function: its journal, its override, its drivers: {said}");
        }
        assert_eq!(said.lines().count(), 2, "{said}");
    });
}
