//! Tests of `millrace train --render kubernetes`: the objects of the Helm chart, and names that Kubernetes refuses.

use serde_json::{Value, json};

use crate::support::{Home, failure, project};

/// A set of values of the chart, the training in it, and the flags that say the same.
const TRAININGS: [(&str, &str, &[&str]); 3] = [
    (
        "pipeline",
        "digits",
        &[
            "--workers=3",
            "--image=millrace:0.1.0",
            "--store-secret=millrace-bucket",
            "--env=KAFKA_PASSWORD=kafka-password:password",
        ],
    ),
    (
        "autoscale",
        "digits",
        &[
            "--workers=2",
            "--image=millrace:0.1.0",
            "--store-secret=millrace-bucket:access-key-id:secret-access-key",
            "--suspend",
        ],
    ),
    (
        "gpu",
        "small",
        &[
            "--workers=2",
            "--image=millrace-cuda@sha256:0000000000000000000000000000000000000000000000000000000000000000",
            "--gpu-product=Tesla-T4",
            "--gpu-shared",
            "--gpu-memory-mib=15000",
            "--tolerate=nvidia.com/gpu",
            "--priority-class=low-millrace",
            "--queue=research",
            "--replace-lost",
        ],
    ),
];

/// The objects of one training, by kind and name, without what depends on the tool that made them: its labels, the
/// namespace, the hash in the names, the layout of TOML.
fn comparable(objects: &[Value], training: &str) -> Vec<Value> {
    let base = format!("millrace-{training}");
    let of = |object: &&Value| object["metadata"]["name"].as_str().unwrap().starts_with(&base);
    let objects: Vec<Value> = objects.iter().filter(of).cloned().collect();
    let config_map = objects.iter().find(|object| object["kind"] == "ConfigMap").unwrap();
    let name = config_map["metadata"]["name"].as_str().unwrap();
    let hash = name.strip_prefix(&format!("{base}-")).unwrap();
    assert!(hash.len() == 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
    let text = serde_json::to_string(&objects).unwrap().replace(hash, "HASH");
    let mut objects: Vec<Value> = serde_json::from_str(&text).unwrap();
    for object in &mut objects {
        let metadata = object["metadata"].as_object_mut().unwrap();
        metadata.remove("namespace");
        let labels = metadata["labels"].as_object_mut().unwrap();
        for label in ["helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"] {
            labels.remove(label);
        }
        if object["kind"] == "ConfigMap" {
            let data = &mut object["data"];
            let config: toml::Table = data["millrace.toml"].as_str().unwrap().parse().unwrap();
            data["millrace.toml"] = serde_json::to_value(config).unwrap();
            data["job.toml"] = json!(data["job.toml"].as_str().unwrap().trim());
        }
    }
    objects.sort_by_key(|object| format!("{} {}", object["kind"], object["metadata"]["name"]));
    objects
}

#[test]
fn rendered_trainings_are_those_of_the_chart() {
    let file = project().join("deploy/manifests/trainings.json");
    let of_chart: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    for (values, training, flags) in TRAININGS {
        let home = Home::new();
        let expected = comparable(of_chart[values].as_array().unwrap(), training);
        assert_eq!(expected.len(), 4, "{values}");
        // The configuration and the job file of the chart are those of the user.
        let config_map = of_chart[values].as_array().unwrap().iter().find(|object| {
            object["kind"] == "ConfigMap" && object["metadata"]["name"].as_str().unwrap().contains(training)
        });
        let data = &config_map.unwrap()["data"];
        let config = home.file("millrace.toml", data["millrace.toml"].as_str().unwrap());
        let job = home.file("job.toml", data["job.toml"].as_str().unwrap());
        let common = [
            "--config",
            config.to_str().unwrap(),
            "train",
            job.to_str().unwrap(),
            "--render=kubernetes",
            "--namespace=vision",
            "--service-account=millrace",
            "--token-secret=training-token",
            "--database-secret=millrace-database",
        ];
        let list: Value = serde_json::from_str(&home.ok([&common[..], flags].concat())).unwrap();
        assert_eq!((&list["apiVersion"], &list["kind"]), (&json!("v1"), &json!("List")));
        let objects = list["items"].as_array().unwrap();
        for object in objects {
            assert_eq!(object["metadata"]["namespace"], "vision");
        }
        let rendered = comparable(objects, training);
        for (ours, theirs) in rendered.iter().zip(&expected) {
            assert_eq!(ours, theirs, "{values}");
        }
        assert_eq!(rendered.len(), expected.len());
        // More workers are the same Jobs; another image needs others.
        let names = |more: &str| {
            let list = home.ok([&common[..], flags, &[more]].concat());
            let list: Value = serde_json::from_str(&list).unwrap();
            list["items"][3]["metadata"]["name"].clone()
        };
        assert_eq!(names("--standbys=3"), objects[3]["metadata"]["name"]);
        assert_ne!(names("--backoff-limit=9"), objects[3]["metadata"]["name"]);
        assert_ne!(names("--limits=memory=3Gi"), objects[3]["metadata"]["name"]);
    }
}

#[test]
fn manifests_that_could_not_run_or_would_show_secrets_are_refused() {
    let home = Home::new();
    let job = "name = \"digits\"\ndataset = \"digits@v1:/train\"\nfeatures = \"x\"\nlabel = \"y\"\n\
               model = { kind = \"mlp\", inputs = 4, hidden = [4], classes = 2 }\n";
    let file = home.file("job.toml", job);
    let meta = "meta_url = \"postgres://m@p/meta\"\n";
    let store = "store_url = \"s3://b/p\"\n";
    let render = |config: &str, more: &[&str]| {
        let config = home.file("render.toml", config);
        let common =
            ["--config", config.to_str().unwrap(), "train", file.to_str().unwrap(), "--render=kubernetes"];
        let needed = ["--image=i", "--token-secret=t"];
        home.run([&common[..], &needed, more].concat())
    };
    let sound = format!("[datafs]\n{meta}{store}");
    assert!(render(&sound, &[]).status.success());
    for (config, says) in [
        (String::new(), "datafs.meta_url"),
        (format!("[datafs]\n{meta}"), "datafs.store_url"),
        (format!("[datafs]\n{}{store}", meta.replace("m@p", "m:hidden@p")), "--database-secret"),
        (format!("{sound}store_options = {{ secret_access_key = \"hidden\" }}\n"), "--store-secret"),
        (format!("{sound}store_options = {{ account_key = \"hidden\" }}\n"), "account_key"),
        (format!("{sound}store_options = {{ sas_key = \"hidden\" }}\n"), "sas_key"),
        (format!("{sound}store_options = {{ service_account_key = \"hidden\" }}\n"), "service_account_key"),
        (format!("{sound}store_options = {{ endpoint = \"http://u:hidden@s\" }}\n"), "endpoint"),
        (
            format!("{sound}store_options = {{ secret_access_key = {{ env = \"KEY\" }} }}\n"),
            "--env KEY=SECRET:KEY",
        ),
        (format!("{sound}[streams]\nproperties = {{ \"ssl.key.pem\" = \"hidden\" }}\n"), "ssl.key.pem"),
    ] {
        let (code, line) = failure(&render(&config, &[]), &config);
        assert!(code == 2 && line.contains(says) && !line.contains("hidden"), "{code} {line}");
    }
    for flag in [
        "--namespace=a b",
        "--namespace=A",
        "--release=1a",
        "--training=a/b",
        "--token-secret=../t",
        "--priority-class=a_b",
        "--queue={{x}}",
        "--gpu-product=a b",
        "--gpu-resource=a/b/c",
        "--tolerate=",
        "--env=A=s",
        "--limits=memory=much",
        "--node-selector=a",
        "--image=a\nb",
    ] {
        let output = render(&sound, &[flag]);
        let text = String::from_utf8_lossy(&output.stderr);
        let name = flag.split('=').next().unwrap();
        assert!(output.status.code() == Some(2) && text.contains(name), "{flag}: {text}");
    }
    // Cards on which no worker would compute.
    for (flags, says) in [
        (&["--gpu-product=Tesla-T4"][..], "device = \"cuda\""),
        (&["--gpus=2"][..], "computes on the processor"),
        (&["--device=cuda", "--gpu-resource=amd.com/gpu"][..], "only on NVIDIA's"),
    ] {
        let (code, line) = failure(&render(&sound, flags), "cards");
        assert!(code == 2 && line.contains(says) && line.contains("cannot render job digits"), "{line}");
    }
    let parts = ["--device=cuda", "--gpu-resource=nvidia.com/mig-1g.10gb"];
    assert!(render(&sound, &parts).status.success());
    // Kubernetes has no such name, and pods have no such file.
    home.file("job.toml", job.replace("\"digits\"\ndataset", "\"Digits_2\"\ndataset"));
    let (code, line) = failure(&render(&sound, &[]), "a name");
    assert!(code == 2 && line.contains("Digits_2") && line.contains("--training"), "{line}");
    assert!(render(&sound, &["--training=digits-2"]).status.success());
    home.file(
        "job.toml",
        job.replace("{ kind = \"mlp\", inputs = 4, hidden = [4], classes = 2 }", "\"m.onnx\""),
    );
    let (code, line) = failure(&render(&sound, &[]), "a model");
    assert!(code == 2 && line.contains("m.onnx") && line.contains("file of this machine"), "{line}");
}
