use super::*;

fn homes() -> Homes {
    let mut config = Config { meta_schema: "own".into(), ..Config::default() };
    config.store_options.insert("secret_access_key".into(), "of-the-driver".into());
    config.encryption_keys.insert("driver".into(), "key-of-the-driver".into());
    homes_of(config)
}

fn homes_of(config: Config) -> Homes {
    Homes::new("/own".into(), config, "/tenants".into(), Box::new(|_, _| Err("never opened".into())))
}

fn secrets(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

const TENANT: [(&str, &str); 4] = [
    ("meta_url", "postgres://a:s3cret@db:5432/volumes?sslmode=require"),
    ("store_url", "s3://bucket/a"),
    ("store_options.access_key_id", "id"),
    ("store_options.secret_access_key", "key\n"),
];

#[test]
fn a_call_without_secrets_uses_the_home_of_the_driver() {
    let place = homes().place(&HashMap::new()).unwrap();
    assert_eq!(place.root.as_path(), Path::new("/own"));
    assert_eq!(place.config, homes().own.config);
}

#[test]
fn a_tenant_gets_no_credentials_of_the_driver_and_keeps_its_folder_when_a_password_changes() {
    let place = homes().place(&secrets(&TENANT)).unwrap();
    assert!(place.root.starts_with("/tenants"));
    assert_eq!(place.config.store_options["secret_access_key"], Secret::from("key"));
    // Variables and the machine's identity are the driver's.
    assert!(!place.config.store_environment && homes().own.config.store_environment);
    let text = place.config_text(Path::new("/keys")).unwrap();
    assert!(!text.contains("of-the-driver") && text.contains("s3cret"), "{text}");
    // The text is a configuration file.
    let table: toml::Table = toml::from_str(&text).unwrap();
    let read: Config = table["datafs"].clone().try_into().unwrap();
    assert_eq!(read, place.config);

    let mut changed = secrets(&TENANT);
    changed.insert("meta_url".into(), "postgres://a:new@db:5432/volumes?sslmode=require".into());
    let changed = homes().place(&changed).unwrap();
    assert_eq!(changed.root, place.root);
    assert_ne!(changed.digest().unwrap(), place.digest().unwrap());

    let mut other = secrets(&TENANT);
    other.insert("meta_schema".into(), "other".into());
    assert_ne!(homes().place(&other).unwrap().root, place.root);
}

#[test]
fn a_tenant_shares_no_files_with_the_driver_or_with_another_tenant() {
    let mut config = homes().own.config;
    (config.meta_file, config.store_dir) = ("/own/meta".into(), "/own/objects".into());
    config.cache_dir = "/disk/cache".into();
    let homes = homes_of(config);
    let [one, other] = ["one", "other"].map(|schema| {
        let mut secrets = secrets(&TENANT);
        secrets.insert("meta_schema".into(), schema.into());
        homes.place(&secrets).unwrap().config
    });
    assert!(one.meta_file.is_relative() && one.store_dir.is_relative());
    assert!(
        one.cache_dir.starts_with("/disk/cache-tenants")
            && other.cache_dir.starts_with("/disk/cache-tenants")
    );
    assert_ne!(one.cache_dir, other.cache_dir);
    let own = homes.place(&HashMap::new()).unwrap().config;
    assert_eq!(own.cache_dir, Path::new("/disk/cache"));
    // One bound holds for the caches of all tenants, wherever they are.
    let relative = self::homes().place(&secrets(&TENANT)).unwrap().config;
    assert!(relative.cache_dir.starts_with("/tenants-caches"));
    for tenant in [&one, &other, &relative] {
        assert!(
            tenant.cache_shared_bound
                && tenant.cache_dir.file_name().is_some_and(Config::is_shared_cache_name)
        );
        assert_eq!(tenant.cache_bytes_max, own.cache_bytes_max);
    }
    assert!(!own.cache_shared_bound);
}

#[test]
fn a_secret_without_urls_only_adds_encryption_keys_to_the_home_of_the_driver() {
    let place = homes().place(&secrets(&[("encryption_keys.mine", "hunter2\n")])).unwrap();
    assert_eq!((place.root.as_path(), &place.config), (Path::new("/own"), &homes().own.config));
    assert_eq!(place.keys.reveal()["mine"], "hunter2");
    // No configuration holds the key, and a key of the same name with another value is told from it.
    let text = place.config_text(Path::new("/keys")).unwrap();
    assert!(text.contains("/keys/") && !text.contains("hunter2"), "{text}");
    let other = homes().place(&secrets(&[("encryption_keys.mine", "hunter3")])).unwrap();
    assert_eq!(other.config_text(Path::new("/keys")).unwrap(), text);
    assert_ne!(other.digest().unwrap(), place.digest().unwrap());
    // Every option of a store, of which each could lead requests of the driver elsewhere.
    for option in STORE_OPTIONS {
        let key = format!("store_options.{option}");
        let refused = homes().place(&secrets(&[(&key, "x")])).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(&key), "{refused}");
    }
}

#[test]
fn secrets_that_reach_for_the_node_or_the_driver_are_refused_without_their_value() {
    let change = |key: &str, value: &str| {
        let mut changed = secrets(&TENANT);
        changed.insert(key.into(), value.into());
        changed
    };
    let without = |key: &str| {
        let mut changed = secrets(&TENANT);
        changed.remove(key);
        changed
    };
    let url = |rest: &str| change("meta_url", &format!("postgres://{rest}"));
    for (wrong, says) in [
        (secrets(&[("meta_schema", "hunter2")]), "meta_schema"),
        (secrets(&[("store_options.endpoint", "http://hunter2")]), "meta_url and store_url"),
        (secrets(&[("store_options.hunter", "hunter2")]), "meta_url and store_url"),
        (secrets(&[("encryption_keys.driver", "hunter2")]), "another name"),
        (secrets(&[("hunter", "hunter2")]), "store_options.OPTION"),
        (change("meta_file", "hunter2"), "meta_file"),
        (change("cache_dir", "hunter2"), "cache_dir"),
        (change("store_options.", "hunter2"), "store_options."),
        (change("store_options.google_service_account", "/hunter2"), "google_service_account"),
        (change("encryption_keys.", "hunter2"), "encryption_keys."),
        (without("store_url"), "store_url"),
        (without("meta_url"), "meta_url"),
        (without("store_options.access_key_id"), "store_options.access_key_id"),
        (change("store_options.access_key_id", "\n"), "store_options.access_key_id"),
        (change("store_url", "file:///hunter2"), "s3://BUCKET"),
        (change("store_url", "s3://"), "s3://BUCKET"),
        (change("store_url", "gs://hunter2"), "service_account_key"),
        (change("meta_url", "mysql://u:hunter2@h/d"), "postgres://"),
        (url("db/hunter2"), "user and password"),
        (url("u@db/hunter2"), "user and password"),
        (url(":hunter2@db/d"), "user and password"),
        (url("u:hunter2@/d"), "host"),
        (url("u:hunter2@%2Frun/d"), "host"),
        (url("u:p@hunter2@db/d"), "host"),
        (url("u:hunter2@db/d?host=/run"), "options"),
        (url("u:hunter2@db/d?passfile=/x"), "options"),
        (url("u:hunter2@db/d?sslrootcert=/root/x"), "sslrootcert"),
        (url("u:hunter2@db/d?sslrootcert=/etc/ssl/../../root/x"), "sslrootcert"),
        (change("encryption_keys.a", &"hunter2".repeat(10_000)), "longer"),
    ] {
        let refused = homes().place(&wrong).unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert!(refused.message().contains(says), "{says}: {refused}");
        assert!(!refused.message().contains("hunter2"), "{refused}");
    }
    let many = (0..=KEYS_MAX).map(|n| (format!("k{n}"), String::new())).collect();
    assert!(homes().place(&many).unwrap_err().message().contains("at most"));
}
