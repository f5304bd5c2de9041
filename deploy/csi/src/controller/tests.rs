use std::collections::BTreeMap;
use std::path::Path;

use millrace_datafs::{Config, Owner, SetXattr};
use proptest::prelude::*;
use tokio::runtime::Runtime;

use super::*;
use crate::proto::csi::volume_capability::access_mode::Mode;
use crate::proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use crate::proto::csi::{CapacityRange, VolumeCapability};

/// A controller on a home of its own.
struct Trial {
    runtime: Runtime,
    controller: ControllerService,
    dir: tempfile::TempDir,
}

fn controller(root: &Path) -> ControllerService {
    let open = Box::new(|root: &Path, config: &Config| Ok(Datafs::open(root, config)?));
    let homes = Homes::new(root.join("home"), Config::default(), root.join("tenants"), open);
    ControllerService::new(Arc::new(homes))
}

fn uses(read_only: bool) -> Vec<VolumeCapability> {
    let mode = if read_only { Mode::MultiNodeReaderOnly } else { Mode::SingleNodeWriter };
    vec![VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }]
}

fn from_snapshot(id: &str) -> VolumeContentSource {
    VolumeContentSource { r#type: Some(SourceType::Snapshot(SnapshotSource { snapshot_id: id.into() })) }
}

fn new_volume(name: &str, required_bytes: i64, source: Option<&str>, read_only: bool) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
        volume_capabilities: uses(read_only),
        volume_content_source: source.map(from_snapshot),
        ..CreateVolumeRequest::default()
    }
}

impl Trial {
    fn new() -> Trial {
        let dir = tempfile::tempdir().unwrap();
        Trial { runtime: Runtime::new().unwrap(), controller: controller(dir.path()), dir }
    }

    /// Ends the driver and starts another one.
    fn restart(&mut self) {
        self.controller = controller(self.dir.path());
    }

    fn datafs(&self) -> Datafs {
        let homes = &self.controller.homes;
        homes.volumes(&homes.place(&HashMap::new()).unwrap()).unwrap()
    }

    fn create(&self, request: CreateVolumeRequest) -> Result<Volume, Status> {
        let made = self.runtime.block_on(self.controller.create_volume(Request::new(request)))?;
        Ok(made.into_inner().volume.unwrap())
    }

    fn delete(&self, id: &str) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: id.into(), ..DeleteVolumeRequest::default() };
        self.runtime.block_on(self.controller.delete_volume(Request::new(request))).map(drop)
    }

    fn snapshot(&self, name: &str, volume: &str) -> Result<Snapshot, Status> {
        let request = CreateSnapshotRequest {
            name: name.into(),
            source_volume_id: volume.into(),
            ..CreateSnapshotRequest::default()
        };
        let made = self.runtime.block_on(self.controller.create_snapshot(Request::new(request)))?;
        Ok(made.into_inner().snapshot.unwrap())
    }

    fn delete_snapshot(&self, id: &str) -> Result<(), Status> {
        let request = DeleteSnapshotRequest { snapshot_id: id.into(), ..DeleteSnapshotRequest::default() };
        self.runtime.block_on(self.controller.delete_snapshot(Request::new(request))).map(drop)
    }

    fn expand(&self, id: &str, required_bytes: i64, limit_bytes: i64) -> Result<i64, Status> {
        let request = ControllerExpandVolumeRequest {
            volume_id: id.into(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes }),
            ..ControllerExpandVolumeRequest::default()
        };
        let made = self.runtime.block_on(self.controller.controller_expand_volume(Request::new(request)))?;
        Ok(made.into_inner().capacity_bytes)
    }

    fn volumes(&self) -> Vec<(String, i64)> {
        let mut all = Vec::new();
        let mut token = String::new();
        loop {
            let request = ListVolumesRequest { max_entries: 2, starting_token: token };
            let page = self.runtime.block_on(self.controller.list_volumes(Request::new(request)));
            let page = page.unwrap().into_inner();
            let volumes = page.entries.into_iter().map(|entry| entry.volume.unwrap());
            all.extend(volumes.map(|volume| (volume.volume_id, volume.capacity_bytes)));
            token = page.next_token;
            if token.is_empty() {
                return all;
            }
        }
    }

    fn snapshots(&self, id: &str, volume: &str) -> Vec<String> {
        let request = ListSnapshotsRequest {
            snapshot_id: id.into(),
            source_volume_id: volume.into(),
            ..ListSnapshotsRequest::default()
        };
        let page = self.runtime.block_on(self.controller.list_snapshots(Request::new(request)));
        let entries = page.unwrap().into_inner().entries;
        entries.into_iter().map(|entry| entry.snapshot.unwrap().snapshot_id).collect()
    }
}

fn code<T>(result: &Result<T, Status>) -> Code {
    result.as_ref().err().map_or(Code::Ok, Status::code)
}

/// What the driver should know, without any of its mechanisms.
#[derive(Debug, Default)]
struct Model {
    volumes: BTreeMap<String, ModelVolume>,
    /// The volume of each snapshot.
    snapshots: BTreeMap<String, String>,
}

#[derive(Debug)]
struct ModelVolume {
    capacity: i64,
    source: Option<String>,
    is_snapshot: bool,
}

impl Model {
    fn id(&self, snapshot: &str) -> String {
        format!("{}@{snapshot}", self.snapshots.get(snapshot).map_or("none", String::as_str))
    }

    fn create(&mut self, name: &str, capacity: i64, source: Option<&str>, read_only: bool) -> Code {
        let wanted = ModelVolume {
            capacity,
            source: source.map(|snapshot| self.id(snapshot)),
            is_snapshot: read_only && source.is_some(),
        };
        if let Some(found) = self.volumes.get(name) {
            let same = found.source == wanted.source && found.is_snapshot == wanted.is_snapshot;
            return if same && found.capacity >= capacity { Code::Ok } else { Code::AlreadyExists };
        }
        if source.is_some_and(|snapshot| !self.snapshots.contains_key(snapshot)) {
            return Code::NotFound;
        }
        self.volumes.insert(name.into(), wanted);
        Code::Ok
    }

    fn delete(&mut self, name: &str) -> Code {
        let Some(found) = self.volumes.get(name) else { return Code::Ok };
        if !found.is_snapshot && self.snapshots.values().any(|volume| volume == name) {
            return Code::FailedPrecondition;
        }
        self.volumes.remove(name);
        Code::Ok
    }

    fn snapshot(&mut self, name: &str, volume: &str) -> Code {
        match (self.volumes.get(volume), self.snapshots.get(name)) {
            (None, _) => Code::NotFound,
            (Some(found), _) if found.is_snapshot => Code::InvalidArgument,
            (_, Some(other)) if other != volume => Code::AlreadyExists,
            _ => {
                self.snapshots.insert(name.into(), volume.into());
                Code::Ok
            }
        }
    }

    fn delete_snapshot(&mut self, name: &str) -> Code {
        let id = self.id(name);
        if self.volumes.values().any(|volume| volume.is_snapshot && volume.source.as_ref() == Some(&id)) {
            return Code::FailedPrecondition;
        }
        self.snapshots.remove(name);
        Code::Ok
    }

    fn expand(&mut self, name: &str, required: i64, limit: i64) -> Code {
        match self.volumes.get_mut(name) {
            _ if limit > 0 && required > limit => Code::OutOfRange,
            None => Code::NotFound,
            Some(found) if limit > 0 && found.capacity > limit => Code::OutOfRange,
            Some(found) => {
                found.capacity = found.capacity.max(required);
                Code::Ok
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Call {
    Create { volume: u8, capacity: i64, source: Option<u8>, read_only: bool },
    Delete { volume: u8 },
    Snapshot { name: u8, volume: u8 },
    DeleteSnapshot { name: u8 },
    Expand { volume: u8, required: i64, limit: i64 },
    Restart,
}

fn call() -> impl Strategy<Value = Call> {
    let (volume, name) = (0..4_u8, 0..3_u8);
    prop_oneof![
        4 => (volume.clone(), 0..4_i64, prop::option::of(name.clone()), any::<bool>()).prop_map(
            |(volume, capacity, source, read_only)| Call::Create { volume, capacity, source, read_only }
        ),
        2 => volume.clone().prop_map(|volume| Call::Delete { volume }),
        3 => (name.clone(), volume.clone()).prop_map(|(name, volume)| Call::Snapshot { name, volume }),
        1 => name.prop_map(|name| Call::DeleteSnapshot { name }),
        1 => (volume, 0..6_i64, 0..6_i64)
            .prop_map(|(volume, required, limit)| Call::Expand { volume, required, limit }),
        1 => Just(Call::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 40, ..ProptestConfig::default() })]

    #[test]
    fn random_calls_answer_as_the_model_does(calls in prop::collection::vec(call(), 1..30)) {
        let mut trial = Trial::new();
        let mut model = Model::default();
        for call in calls {
            let (found, wanted) = match &call {
                Call::Create { volume, capacity, source, read_only } => {
                    let (name, source) = (format!("v{volume}"), source.map(|name| format!("s{name}")));
                    let id = source.as_ref().map(|source| model.id(source));
                    let made = trial.create(new_volume(&name, *capacity, id.as_deref(), *read_only));
                    (code(&made), model.create(&name, *capacity, source.as_deref(), *read_only))
                }
                Call::Delete { volume } => {
                    let name = format!("v{volume}");
                    (code(&trial.delete(&name)), model.delete(&name))
                }
                Call::Snapshot { name, volume } => {
                    let (name, volume) = (format!("s{name}"), format!("v{volume}"));
                    (code(&trial.snapshot(&name, &volume)), model.snapshot(&name, &volume))
                }
                Call::DeleteSnapshot { name } => {
                    let name = format!("s{name}");
                    (code(&trial.delete_snapshot(&model.id(&name))), model.delete_snapshot(&name))
                }
                Call::Expand { volume, required, limit } => {
                    let name = format!("v{volume}");
                    (code(&trial.expand(&name, *required, *limit)), model.expand(&name, *required, *limit))
                }
                Call::Restart => {
                    trial.restart();
                    (Code::Ok, Code::Ok)
                }
            };
            prop_assert_eq!(found, wanted, "{:?} with {:?}", call, model);
            let volumes: Vec<_> =
                model.volumes.iter().map(|(name, volume)| (name.clone(), volume.capacity)).collect();
            prop_assert_eq!(trial.volumes(), volumes);
            let snapshots: Vec<_> = model.snapshots.keys().map(|name| model.id(name)).collect();
            prop_assert_eq!(trial.snapshots("", ""), snapshots);
        }
    }
}

#[test]
fn a_writable_volume_from_a_snapshot_holds_all_of_it() {
    let trial = Trial::new();
    trial.create(new_volume("a", 0, None, false)).unwrap();
    let datafs = trial.datafs();
    let a = datafs.view(&"a".parse().unwrap()).unwrap();
    let owner = Owner { uid: 1234, gid: 4321 };
    let folder = a.mkdir(a.root(), "d".as_ref(), 0o2750, owner).unwrap().node;
    a.write_file("d/f", &[7; 100_000]).unwrap();
    let file = a.resolve("d/f").unwrap().node;
    let set = millrace_datafs::SetAttr {
        uid: Some(owner.uid),
        gid: Some(owner.gid),
        mode: Some(0o4711),
        ..Default::default()
    };
    a.setattr(file, &set).unwrap();
    a.xattr_set(file, "security.x".as_ref(), b"kept", SetXattr::Any).unwrap();
    a.symlink(folder, "l".as_ref(), "f".as_ref(), owner).unwrap();
    a.publish(millrace_datafs::Publish::new().put_key("ingest/next", "4")).unwrap();
    let id = trial.snapshot("s", "a").unwrap().snapshot_id;
    a.write_file("d/f", b"later").unwrap();

    let request = new_volume("b", 0, Some(&id), false);
    let made = trial.create(request.clone()).unwrap();
    assert_eq!(made.content_source, Some(from_snapshot("a@s")));
    assert_eq!(made.volume_context[SPEC], "b");
    let b = datafs.view(&"b".parse().unwrap()).unwrap();
    assert_eq!(b.read_file("d/f").unwrap(), vec![7; 100_000]);
    let snapshot = datafs.view(&"a@s".parse().unwrap()).unwrap();
    for path in ["", "d", "d/f"] {
        let (old, new) = (snapshot.resolve(path).unwrap(), b.resolve(path).unwrap());
        assert_eq!(
            (old.uid, old.gid, old.mode, old.mtime),
            (new.uid, new.gid, new.mode, new.mtime),
            "{path}"
        );
    }
    let copied = b.resolve("d/f").unwrap().node;
    assert_eq!(b.xattr_get(copied, "security.x".as_ref()).unwrap(), b"kept");
    let link = b.lookup(b.resolve("d").unwrap().node, "l".as_ref()).unwrap();
    assert_eq!((link.uid, link.gid), (owner.uid, owner.gid));
    assert_eq!(b.key_get("ingest/next").unwrap(), Some(b"4".to_vec()));
    // It is a volume of its own: what is changed in it stays when the call is repeated.
    b.write_file("d/f", b"own").unwrap();
    trial.create(request).unwrap();
    assert_eq!(&b.read_file("d/f").unwrap()[..], b"own");
    assert_eq!(&snapshot.read_file("d/f").unwrap()[..], [7; 100_000]);
}

#[test]
fn an_encryption_key_of_a_secret_encrypts_a_new_volume() {
    let trial = Trial::new();
    let secrets = |key: String| HashMap::from([("encryption_keys.mine".to_owned(), key)]);
    let new = |secrets| CreateVolumeRequest {
        parameters: HashMap::from([("encryptionKey".to_owned(), "mine".to_owned())]),
        secrets,
        ..new_volume("a", 0, None, false)
    };
    let refused = trial.create(new(secrets("hunter2".into()))).unwrap_err();
    assert!(refused.message().contains("32 bytes") && !refused.message().contains("hunter2"), "{refused}");
    let key = secrets("0a".repeat(32));
    trial.create(new(key.clone())).unwrap();
    let homes = &trial.controller.homes;
    let datafs = homes.volumes(&homes.place(&key).unwrap()).unwrap();
    datafs.view(&"a".parse().unwrap()).unwrap().write_file("f", &[7; 100_000]).unwrap();
}

#[test]
fn a_read_only_volume_from_a_snapshot_is_the_snapshot() {
    let trial = Trial::new();
    trial.create(new_volume("a", 0, None, false)).unwrap();
    let id = trial.snapshot("s", "a").unwrap().snapshot_id;
    let made = trial.create(new_volume("b", 0, Some(&id), true)).unwrap();
    assert_eq!((made.volume_id.as_str(), made.volume_context[SPEC].as_str()), ("b", "a@s"));
    assert!(trial.datafs().view(&"b".parse().unwrap()).is_err());
    assert_eq!(code(&trial.delete_snapshot(&id)), Code::FailedPrecondition);
    trial.delete("b").unwrap();
    trial.delete_snapshot(&id).unwrap();
    trial.delete("a").unwrap();
}

#[test]
fn what_others_made_is_found_and_never_deleted() {
    let trial = Trial::new();
    let datafs = trial.datafs();
    datafs.volume_create(&"theirs".parse().unwrap()).unwrap();
    datafs.snapshot_create(&"theirs".parse().unwrap(), &"monday".parse().unwrap()).unwrap();
    assert_eq!(code(&trial.create(new_volume("theirs", 0, None, false))), Code::AlreadyExists);
    assert_eq!(code(&trial.create(new_volume("millrace-csi", 0, None, false))), Code::InvalidArgument);
    assert_eq!(code(&trial.snapshot("monday", "theirs")), Code::AlreadyExists);
    assert_eq!(trial.snapshots("theirs@monday", ""), ["theirs@monday"]);
    assert_eq!(trial.snapshots("", "theirs"), ["theirs@monday"]);
    assert_eq!(trial.snapshots("", ""), [""; 0]);
    // A claim on it, as of a VolumeSnapshotContent that was made by hand.
    assert!(trial.create(new_volume("claim", 0, Some("theirs@monday"), true)).is_ok());
    for refused in
        [trial.delete("theirs"), trial.delete("theirs@monday"), trial.delete_snapshot("theirs@monday")]
    {
        assert_eq!(code(&refused), Code::FailedPrecondition);
    }
    assert!(trial.snapshot("own", "theirs").is_ok());
    assert!(datafs.view(&"theirs@monday".parse().unwrap()).is_ok());
    assert_eq!(trial.expand("theirs", 9, 0).unwrap(), 9);
}

#[test]
fn a_volume_that_a_crash_left_half_made_is_completed_or_deleted() {
    let trial = Trial::new();
    let records = Registry::open(&trial.datafs()).unwrap();
    for (name, has_volume) in [("a", false), ("b", true)] {
        let record = VolumeRecord::new(5, None, false, BTreeMap::new());
        records.put(&name.parse().unwrap(), &record, None).unwrap();
        if has_volume {
            trial.datafs().volume_create(&name.parse().unwrap()).unwrap();
        }
        assert!(trial.volumes().iter().all(|(listed, _)| listed != name));
        assert_eq!(trial.create(new_volume(name, 5, None, false)).unwrap().capacity_bytes, 5);
    }
    let record = VolumeRecord::new(5, None, false, BTreeMap::new());
    records.put(&"c".parse().unwrap(), &record, None).unwrap();
    trial.delete("c").unwrap();
    assert_eq!(trial.volumes(), [("a".into(), 5), ("b".into(), 5)]);
}

#[test]
fn requests_with_missing_or_wrong_fields_are_refused_by_name() {
    let trial = Trial::new();
    let good = || new_volume("a", 0, None, false);
    let refuses = |request: CreateVolumeRequest, says: &str| {
        let refused = trial.create(request).unwrap_err();
        assert!(
            refused.code() == Code::InvalidArgument && refused.message().contains(says),
            "{says}: {refused}"
        );
    };
    refuses(CreateVolumeRequest { name: String::new(), ..good() }, "name");
    refuses(CreateVolumeRequest { name: "../x".into(), ..good() }, "name");
    refuses(CreateVolumeRequest { volume_capabilities: vec![], ..good() }, "volume_capabilities");
    let map = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
    refuses(CreateVolumeRequest { parameters: map("x", "y"), ..good() }, "parameters[\"x\"]");
    refuses(CreateVolumeRequest { parameters: map("volumePrefix", "../"), ..good() }, "name");
    refuses(CreateVolumeRequest { mutable_parameters: map("x", "y"), ..good() }, "mutable_parameters");
    refuses(CreateVolumeRequest { secrets: map("x", "y"), ..good() }, "secrets[\"x\"]");
    let live =
        SourceType::Volume(crate::proto::csi::volume_content_source::VolumeSource { volume_id: "b".into() });
    let live = Some(VolumeContentSource { r#type: Some(live) });
    refuses(CreateVolumeRequest { volume_content_source: live, ..good() }, "volume_content_source.volume");
    refuses(CreateVolumeRequest { volume_content_source: Some(from_snapshot("")), ..good() }, "snapshot_id");
    let negative = Some(CapacityRange { required_bytes: -1, limit_bytes: 0 });
    refuses(CreateVolumeRequest { capacity_range: negative, ..good() }, "capacity_range");
    let unknown = CreateVolumeRequest { parameters: map("encryptionKey", "none"), ..good() };
    assert_eq!(code(&trial.create(unknown)), Code::FailedPrecondition);
    // Nothing of the refused volume is left.
    assert!(trial.volumes().is_empty() && trial.create(good()).is_ok());
    for source in ["none", "a@latest", "a@b@c", "none@s"] {
        let missing = CreateVolumeRequest { volume_content_source: Some(from_snapshot(source)), ..good() };
        let missing = CreateVolumeRequest { name: "new".into(), ..missing };
        assert_eq!(code(&trial.create(missing)), Code::NotFound, "{source}");
    }
    for refused in [
        trial.delete(""),
        trial.delete_snapshot(""),
        trial.snapshot("", "a").map(drop),
        trial.snapshot("latest", "a").map(drop),
        trial.snapshot("s", "").map(drop),
        trial.expand("", 1, 0).map(drop),
    ] {
        assert_eq!(code(&refused), Code::InvalidArgument);
    }
    for gone in ["none", "a@none", "/etc/passwd", "a@b@c", "a@none#x"] {
        assert!(trial.delete(gone).is_ok() && trial.delete_snapshot(gone).is_ok(), "{gone}");
        assert_eq!(code(&trial.snapshot("s", gone)), Code::NotFound, "{gone}");
    }
    let long = trial.snapshot(&"x".repeat(128), "a").unwrap();
    assert!(long.snapshot_id.len() < 64);
    assert_eq!(trial.snapshots(&long.snapshot_id, ""), [long.snapshot_id]);
}

#[test]
fn a_call_for_a_volume_that_another_call_works_on_is_aborted() {
    let trial = Trial::new();
    let turn = trial.controller.volume_turn("a").unwrap();
    assert_eq!(code(&trial.create(new_volume("a", 0, None, false))), Code::Aborted);
    assert_eq!(code(&trial.delete("a")), Code::Aborted);
    assert_eq!(code(&trial.snapshot("s", "a")), Code::Aborted);
    assert!(trial.create(new_volume("b", 0, None, false)).is_ok());
    drop(turn);
    assert!(trial.create(new_volume("a", 0, None, false)).is_ok());
}

#[test]
fn a_silent_server_of_a_tenant_delays_no_other_home() {
    let dir = tempfile::tempdir().unwrap();
    // Ends last: it waits for the threads of the silent server.
    let runtime = Runtime::new().unwrap();
    let (own, tenants) = (dir.path().join("home"), dir.path().join("tenants"));
    let silent = tenants.clone();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let ended = parking_lot::Mutex::new(ended);
    let open = Box::new(move |root: &Path, config: &Config| {
        if root.starts_with(&silent) {
            // As a server that accepts the connection and sends nothing.
            let _ = ended.lock().recv();
            return Err("the server was silent".into());
        }
        Ok(Datafs::open(root, config)?)
    });
    let homes = Homes::new(own, Config::default(), tenants, open);
    let mut controller = ControllerService::new(Arc::new(homes));
    Arc::get_mut(&mut controller.limits).unwrap().wait = std::time::Duration::from_millis(20);
    let secrets = [
        ("meta_url", "postgres://a:b@silent/d"),
        ("store_url", "s3://bucket"),
        ("store_options.access_key_id", "id"),
        ("store_options.secret_access_key", "key"),
    ];
    let secrets: HashMap<String, String> = secrets.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let call = |name: String, secrets: HashMap<String, String>| {
        let controller = controller.clone();
        let request = CreateVolumeRequest { secrets, ..new_volume(&name, 0, None, false) };
        runtime.spawn(async move { controller.create_volume(Request::new(request)).await.map(drop) })
    };
    let stuck: Vec<_> = (0..64).map(|n| call(format!("v{n}"), secrets.clone())).collect();
    for stuck in stuck {
        let refused = runtime.block_on(stuck).unwrap().unwrap_err();
        assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    }
    // Two threads still wait for the server; the driver's own home answers.
    runtime.block_on(call("own".into(), HashMap::new())).unwrap().unwrap();
    drop(end);
}
