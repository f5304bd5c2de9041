use tokio_util::sync::CancellationToken;

use super::*;
use crate::keys::Keys;
use crate::publication::Publications;
use crate::servers::Launch;

#[tokio::test]
async fn a_hung_mount_keeps_one_thread_and_refuses_further_questions() {
    let (looks, looking) = (Arc::new(Semaphore::new(2)), Busy::default());
    let (answer, hung) = std::sync::mpsc::channel::<u64>();
    let hang = move || hung.recv().map_err(|_| refused(Code::Internal, "gone".into()));
    let at = Path::new("/a");
    let first = tokio::spawn({
        let (looks, looking) = (Arc::clone(&looks), looking.clone());
        async move { look(&looks, &looking, Path::new("/a"), hang).await }
    });
    while looks.available_permits() == 2 {
        tokio::task::yield_now().await;
    }
    for _ in 0..1000 {
        let refused = look(&looks, &looking, at, || Ok(0)).await.unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(refused.message().contains("/a"), "{refused}");
    }
    assert_eq!(looks.available_permits(), 1);
    assert_eq!(look(&looks, &looking, Path::new("/b"), || Ok(7)).await.unwrap(), 7);
    // The caller gives up; the thread and the turn stay until the mount answers.
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    assert!(look(&looks, &looking, at, || Ok(0)).await.is_err());
    answer.send(1).unwrap();
    while looks.available_permits() < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(look(&looks, &looking, at, || Ok(9)).await.unwrap(), 9);
}

/// The node service of a driver whose program does not exist.
fn node(dir: &Path, holder: Option<String>) -> NodeService {
    let publications = Publications::open(dir.join("published")).unwrap();
    let tenants = dir.join("tenants");
    let launch = Launch {
        program: "/nonexistent".into(),
        holder,
        log: None,
        tenants: tenants.clone(),
        metrics: false,
    };
    let config = millrace_datafs::Config::default();
    let homes = Homes::new(dir.join("home"), config, tenants, Box::new(|_, _| Err("never opened".into())));
    NodeService {
        node_id: "n".into(),
        volumes_max: 0,
        kubelet: dir.to_owned(),
        homes: Arc::new(homes),
        servers: Servers::new(launch, publications, CancellationToken::new()).unwrap(),
        calls: Arc::new(Semaphore::new(1)),
        looks: Arc::new(Semaphore::new(1)),
        looking: Busy::default(),
    }
}

/// The place of a call with a secret.
fn place(node: &NodeService, secrets: &[(&str, &str)]) -> Place {
    let secrets = secrets.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    node.homes.place(&secrets).unwrap()
}

/// A request without secrets to publish at a target.
fn wanted(node: &NodeService, at: &Path) -> Wanted {
    Wanted {
        volume_id: "mine".into(),
        spec: "mine".parse().unwrap(),
        target: at.to_owned(),
        flags: MountFlags::default(),
        place: place(node, &[]),
    }
}

/// The record of a volume that was published without secrets, and whose server has ended.
fn publication(node: &NodeService, at: &Path) -> Publication {
    let place = place(node, &[]);
    Publication {
        format: FORMAT,
        volume_id: "mine".into(),
        spec: "mine".parse().unwrap(),
        target: at.to_owned(),
        flags: MountFlags::default(),
        config_digest: place.digest().unwrap(),
        home: place.root,
        driver: String::new(),
        server: None,
    }
}

#[tokio::test]
async fn unpublish_with_another_volume_leaves_the_restarts_of_the_mount() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path(), None);
    let at = dir.path().join("mount");
    let last = node.servers.keep_none(&at);
    let locked = node.servers.publications().lock(&at).unwrap();
    locked.write(&publication(&node, &at)).unwrap();
    // While a restart has the lock, and without one.
    assert_eq!(node.unpublish("other", &at).await.unwrap_err().code(), Code::NotFound);
    drop(locked);
    assert_eq!(node.unpublish("other", &at).await.unwrap_err().code(), Code::NotFound);
    assert!(!last.is_cancelled());
    let locked = node.servers.publications().lock(&at).unwrap();
    assert_eq!(node.unpublish("mine", &at).await.unwrap_err().code(), Code::Aborted);
    assert!(last.is_cancelled());
    drop(locked);
    // A repeated publication is not answered with a bare folder while the server is being started again.
    std::fs::create_dir(&at).unwrap();
    assert_eq!(node.servers.is_serving(&at).await.unwrap_err().code(), Code::Unavailable);
    assert!(!node.servers.is_serving(&dir.path().join("other")).await.unwrap());
}

#[tokio::test]
async fn a_changed_configuration_without_a_server_is_not_answered_with_a_bare_folder() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path(), None);
    let at = dir.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    let none = Keys::default();
    let change = |digest: &str| {
        let locked = node.servers.publications().lock(&at).unwrap();
        locked.write_config("# of an earlier program", &none).unwrap();
        let found = publication(&node, &at);
        locked.write(&Publication { config_digest: digest.to_owned(), ..found }).unwrap();
    };
    let digest = publication(&node, &at).config_digest;
    // The file differs, as after a rollback. Or a driver was started with another configuration.
    for changed in [digest.as_str(), "of another configuration"] {
        change(changed);
        for _ in 0..2 {
            let refused = node.publish(wanted(&node, &at)).await.unwrap_err();
            assert!(refused.message().contains("cannot start /nonexistent"), "{refused}");
        }
        assert_eq!(node.servers.publications().find(&at).unwrap().unwrap().config_digest, digest);
    }
    // While its server is being started again, which then takes the new configuration.
    let _last = node.servers.keep_none(&at);
    change("of another configuration");
    let refused = node.publish(wanted(&node, &at)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    let locked = node.servers.publications().lock(&at).unwrap();
    let text = place(&node, &[]).config_text(&locked.keys()).unwrap();
    assert!(locked.has_config(&text, &none));
}

#[tokio::test]
async fn a_replacement_that_failed_is_repeated_also_if_only_the_file_differed() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path(), Some("unix:///nonexistent".into()));
    let at = dir.path().join("mount");
    std::fs::create_dir(&at).unwrap();
    let locked = node.servers.publications().lock(&at).unwrap();
    locked.write_config("# of an earlier program", &Keys::default()).unwrap();
    locked.write(&publication(&node, &at)).unwrap();
    drop(locked);
    // The old server runs.
    let _last = node.servers.keep_none(&at);
    for _ in 0..3 {
        let refused = node.publish(wanted(&node, &at)).await.unwrap_err();
        assert!(refused.message().contains("cannot start /nonexistent"), "{refused}");
    }
}

#[tokio::test]
async fn encryption_keys_of_a_secret_reach_the_server_in_private_files_that_go_with_the_record() {
    let dir = tempfile::tempdir().unwrap();
    let node = node(dir.path(), None);
    let at = dir.path().join("mount");
    let locked = node.servers.publications().lock(&at).unwrap();
    for value in ["hunter2", "hunter3"] {
        let place = place(&node, &[("encryption_keys.k", value)]);
        node.begin(&locked, &place, &publication(&node, &at)).await.unwrap();
        let text = std::fs::read_to_string(locked.config()).unwrap();
        assert!(!text.contains(value), "{text}");
        let table: toml::Table = toml::from_str(&text).unwrap();
        let read: millrace_datafs::Config = table["datafs"].clone().try_into().unwrap();
        assert_eq!(read.encryption_keys["k"].text("").unwrap(), value);
        assert_eq!(std::fs::read_dir(locked.keys()).unwrap().count(), 1);
    }
    locked.remove().unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("published")).unwrap().count(), 0);
}
