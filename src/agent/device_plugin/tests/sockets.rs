//! The lives and deaths of sockets.

use std::os::unix::fs::FileTypeExt;

use super::*;

#[tokio::test]
async fn an_absent_kubelet_is_waited_for_aloud_and_registered_with_once_it_appears() {
    let node = Node::start();
    node.offer(&[(T4, &[1])]);
    let waiting = |state: Option<&PluginState>| {
        state.is_some_and(|state| !state.registered && state.message.starts_with("waiting for the kubelet: "))
    };
    node.until_state(T4, "a word about waiting", waiting).await;

    let kubelet = node.kubelet();

    kubelet.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
    node.until_registered(T4).await;
}

#[tokio::test]
async fn a_socket_with_no_kubelet_behind_it_is_named_until_a_kubelet_takes_its_place() {
    let node = Node::that_never_retries();
    node.kubelet().kill();
    node.offer(&[(T4, &[1])]);
    let unreachable = |state: Option<&PluginState>| {
        state.is_some_and(|state| !state.registered && state.message.contains("Connection refused"))
    };
    node.until_state(T4, "the reason", unreachable).await;

    let kubelet = node.kubelet();

    kubelet.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
    node.until_registered(T4).await;
}

#[tokio::test]
async fn nothing_is_registered_before_the_first_offer() {
    let node = Node::start();
    let kubelet = node.kubelet();
    assert_eq!(node.own_sockets(), [] as [String; 0]);
    node.offer(&[(T4, &[1, 2])]);
    let seen = kubelet.until(T4, "the devices", |seen| !seen.lists.is_empty()).await;
    assert_eq!(seen.lists, [seen.lists[0].clone()]);
    assert_eq!(seen.ids(), [id(1), id(2)], "the first list is the whole one");
}

#[tokio::test]
async fn a_slow_kubelet_is_waited_for_and_counts_as_registered_only_when_it_reads() {
    for held in [Held::Answer, Held::List] {
        let node = Node::that_never_retries();
        let kubelet = FakeKubelet::start_slow(node.path(), held);
        node.offer(&[(T4, &[1])]);
        kubelet.until(T4, "a registration", |seen| seen.registrations == 1).await;
        assert!(!node.plugins.subscribe().borrow().get(&name(T4)).is_some_and(|state| state.registered), "{held:?}");
        kubelet.let_go();
        node.until_registered(T4).await;
        assert_eq!(kubelet.seen(T4).registrations, 1, "{held:?}");
    }
}

#[tokio::test]
async fn a_new_kubelet_does_not_pay_for_the_failures_of_the_one_before() {
    let node = Node::that_retries(Backoff::new(Duration::from_millis(10), Duration::from_secs(86_400)));
    // The pauses add up to a second and a quarter, and the next one would last longer than all of them.
    let first = FakeKubelet::start_slow(node.path(), Held::Refuses(7));
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;

    first.kill();
    node.until_state(T4, "unregistered", |state| state.is_some_and(|state| !state.registered)).await;
    let second = FakeKubelet::start_slow(node.path(), Held::Refuses(1));
    let began = std::time::Instant::now();
    second.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;

    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_kubelet_that_restarts_and_wipes_gets_every_resource_again() {
    let node = Node::start();
    let first = node.kubelet();
    node.offer(&[(T4, &[1]), (A10, &[3])]);
    node.until_registered(T4).await;
    node.until_registered(A10).await;

    first.kill();
    let second = node.kubelet();

    second.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
    second.until(A10, "the device", |seen| seen.ids() == [id(3)]).await;
}

#[tokio::test]
async fn a_kubelet_that_restarts_without_wiping_gets_every_resource_again() {
    let node = Node::start();
    let first = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;

    first.kill();
    let second = FakeKubelet::start_without_wiping(node.path());

    second.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
    node.until_registered(T4).await;
}

#[tokio::test]
async fn a_kubelet_that_takes_the_socket_over_while_the_old_one_still_reads_gets_every_resource() {
    let node = Node::start();
    let old = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;

    let new = FakeKubelet::start_without_wiping(node.path());

    new.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
    old.until(T4, "its list closed", Seen::is_closed).await;
}

#[tokio::test]
async fn a_dead_kubelet_is_seen_before_the_next_one_comes() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;

    kubelet.kill();

    node.until_state(T4, "unregistered", |state| state.is_some_and(|state| !state.registered)).await;
}

#[tokio::test]
async fn a_socket_of_ours_that_is_removed_comes_back_and_is_registered_again() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;
    let socket = node.path().join(kubelet.seen(T4).request.endpoint);

    std::fs::remove_file(&socket).unwrap();

    kubelet.until(T4, "a second registration", |seen| seen.registrations == 2 && seen.connected).await;
    assert!(std::fs::metadata(&socket).unwrap().file_type().is_socket());
    let lists = kubelet.seen(T4).lists;
    assert!(lists.iter().all(|list| !list.is_empty()), "no list may be empty on the way: {lists:?}");
}

#[tokio::test]
async fn a_wiped_directory_ends_nothing_while_the_kubelet_still_reads() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;

    std::fs::remove_file(node.path().join("kubelet.sock")).unwrap();
    std::fs::remove_file(node.path().join(kubelet.seen(T4).request.endpoint)).unwrap();
    node.offer(&[(T4, &[1, 2])]);

    let seen = kubelet.until(T4, "two devices", |seen| seen.ids() == [id(1), id(2)]).await;
    assert_eq!((seen.registrations, seen.connected), (1, true));
}

#[tokio::test]
async fn a_directory_that_is_removed_and_made_again_is_served_again() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("device-plugins");
    let (plugins, _shutdown) = start_in(&dir, Arc::new(|_: &[Device]| BTreeMap::new()));
    plugins.offer(offer_of(&[(T4, &[1])]));
    let missing = |state: Option<&PluginState>| state.is_some_and(|state| !state.registered);
    until_state(plugins.subscribe(), T4, "a word about waiting", missing).await;
    std::fs::create_dir(&dir).unwrap();
    let first = FakeKubelet::start(&dir);
    first.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;

    first.kill();
    std::fs::remove_dir_all(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    let second = FakeKubelet::start(&dir);

    second.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
}

#[tokio::test]
async fn the_kubelets_notes_are_told_of_and_nothing_else_of_its_directory_is() {
    let dir = tempfile::tempdir().unwrap();
    let noted = Arc::new(tokio::sync::Notify::new());
    let changes = watch::Sender::new(0);
    let mut followed = changes.subscribe();
    let following = super::super::directory::Directory::new(dir.path().to_owned()).follow(changes, noted.clone());
    let _following = tokio::spawn(following);
    // It looks once the watch is set.
    followed.changed().await.unwrap();
    std::fs::write(dir.path().join(".tmp"), "").unwrap();
    std::fs::write(dir.path().join("kubelet.sock"), "").unwrap();
    followed.changed().await.unwrap();
    let early = tokio::time::timeout(Duration::ZERO, noted.notified()).await;
    assert!(early.is_err(), "no notes yet");
    std::fs::rename(dir.path().join(".tmp"), dir.path().join("kubelet_internal_checkpoint")).unwrap();
    noted.notified().await;
}

#[tokio::test]
async fn a_list_that_the_kubelet_closes_is_registered_again() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1])]);
    node.until_registered(T4).await;

    kubelet.hang_up();

    kubelet.until(T4, "a second registration", |seen| seen.registrations == 2 && seen.connected).await;
    node.until_registered(T4).await;
}

#[tokio::test]
async fn a_resource_withdrawn_while_there_is_no_kubelet_is_not_registered_later() {
    let node = Node::start();
    node.offer(&[(T4, &[1]), (A10, &[3])]);
    node.until_state(T4, "waiting", |state| state.is_some()).await;
    node.offer(&[(A10, &[3])]);
    node.until_state(T4, "its end", |state| state.is_none()).await;

    let kubelet = node.kubelet();
    kubelet.until(A10, "the device", |seen| seen.ids() == [id(3)]).await;

    assert_eq!(kubelet.seen(T4).registrations, 0);
}

#[tokio::test]
async fn a_shutdown_closes_the_lists_as_they_are_and_removes_the_sockets() {
    let node = Node::start();
    let kubelet = node.kubelet();
    node.offer(&[(T4, &[1]), (A10, &[3])]);
    node.until_registered(T4).await;
    node.until_registered(A10).await;

    node.shutdown.send_replace(true);
    let seen = kubelet.until(T4, "a closed list", Seen::is_closed).await;
    let Node { dir, plugins, shutdown: _shutdown } = node;
    tokio::time::timeout(PATIENCE, plugins.stop()).await.unwrap();

    assert_eq!(seen.lists.len(), 1, "a restarting agent takes nothing back");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["kubelet.sock"]);
}

#[tokio::test]
async fn sockets_of_an_earlier_run_are_replaced_and_those_of_others_are_left() {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = FakeKubelet::start(dir.path());
    let leftover = dir.path().join("gpuvirt-0123456789abcdef.sock");
    let foreign = dir.path().join("kubevirt-kvm.sock");
    let own = dir.path().join(super::super::directory::socket_name(&name(T4)));
    for path in [&leftover, &foreign, &own] {
        drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    }

    let (plugins, _shutdown) = start_in(dir.path(), Arc::new(|_: &[Device]| BTreeMap::new()));
    plugins.offer(offer_of(&[(T4, &[1])]));

    kubelet.until(T4, "the device", |seen| seen.ids() == [id(1)]).await;
    assert!(!leftover.exists() && foreign.exists());
}

#[tokio::test]
async fn a_directory_too_deep_for_a_socket_is_said() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("d".repeat(120));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("kubelet.sock"), "").unwrap();
    let (plugins, _shutdown) = start_in(&dir, Arc::new(|_: &[Device]| BTreeMap::new()));

    plugins.offer(offer_of(&[(T4, &[1])]));

    let said = |state: Option<&PluginState>| {
        state.is_some_and(|state| !state.registered && state.message.contains("is longer than 107 bytes"))
    };
    until_state(plugins.subscribe(), T4, "the reason", said).await;
}
