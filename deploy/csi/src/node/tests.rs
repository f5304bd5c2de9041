use tokio_util::sync::CancellationToken;

use super::*;
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

#[tokio::test]
async fn unpublish_with_another_volume_leaves_the_restarts_of_the_mount() {
    let dir = tempfile::tempdir().unwrap();
    let publications = Publications::open(dir.path().join("published")).unwrap();
    let launch = Launch {
        program: "/nonexistent".into(),
        holder: None,
        log: None,
        tenants: dir.path().join("tenants"),
        metrics: false,
    };
    let servers = Servers::new(launch, publications, CancellationToken::new()).unwrap();
    let config = millrace_datafs::Config::default();
    let tenants = dir.path().join("tenants");
    let homes =
        Homes::new(dir.path().join("home"), config, tenants, Box::new(|_, _| Err("never opened".into())));
    let node = NodeService {
        node_id: "n".into(),
        volumes_max: 0,
        kubelet: dir.path().to_owned(),
        homes: Arc::new(homes),
        servers,
        calls: Arc::new(Semaphore::new(1)),
        looks: Arc::new(Semaphore::new(1)),
        looking: Busy::default(),
    };
    let at = dir.path().join("mount");
    let last = node.servers.keep_none(&at);
    let locked = node.servers.publications().lock(&at).unwrap();
    let publication = Publication {
        format: FORMAT,
        volume_id: "mine".into(),
        spec: "mine".parse().unwrap(),
        target: at.clone(),
        flags: MountFlags::default(),
        home: "/home".into(),
        config_digest: String::new(),
        driver: String::new(),
        server: None,
    };
    locked.write(&publication).unwrap();
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
