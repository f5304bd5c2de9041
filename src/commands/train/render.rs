//! `millrace train --render kubernetes`: the objects of a training, as the Helm chart has them.
//!
//! Coordinators are one Indexed Job, of which one pod leads, and workers another, beside a ConfigMap with the
//! configuration and the job file, and a headless Service. Names end in a hash of what the pods do, because the template of
//! a Job cannot change. `tests/journeys/render.rs` compares the objects with those of the chart.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use millrace_datafs::{Secret, is_public_store_option};
use millrace_streams::is_public_property;
use millrace_trainer::engine::Device;
use millrace_trainer::job::{JobFile, ModelSource};
use serde::Serialize;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::cli::{DeviceArg, RenderArgs, TrainArgs, training};
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::settings::Settings;

/// Keys of `[datafs]` whose values are folders and files of one machine.
const LOCAL_KEYS: [&str; 5] = ["meta_file", "meta_passfile", "store_dir", "cache_dir", "cache_shared_bound"];

/// Prints the manifests of a job file.
pub(super) fn run(context: &Context, args: &TrainArgs, file: &Path) -> Result<()> {
    let text = JobFile::read(file)?;
    let job = JobFile::of_file(file, &text)?;
    if let ModelSource::File(model) = &job.model {
        return fail(
            Exit::Usage,
            format!(
                "cannot render job {}: its model {} is a file of this machine, which pods do not have; describe a built-in \
                 model, or build the file into the image and render with the chart",
                job.name,
                model.display()
            ),
        );
    }
    check_cards(args, &job)?;
    let config = configuration(&context.loaded.settings, &args.render)?;
    let objects = Training::new(args, &job, config, text)?.objects();
    context.out.raw(&format!("{:#}\n", json!({ "apiVersion": "v1", "kind": "List", "items": objects })))
}

/// Refuses to reserve cards on which the workers would not compute.
fn check_cards(args: &TrainArgs, job: &JobFile) -> Result<()> {
    let Some((resource, _)) = args.render.cards() else { return Ok(()) };
    let on_cuda = match args.device {
        Some(device) => matches!(device, DeviceArg::Cuda),
        None => matches!(job.device, Device::Cuda(_)),
    };
    let wrong = if !on_cuda {
        "computes on the processor, and its cards would stay idle; add --device cuda or device = \"cuda\" in the job file, or \
         leave the flags of cards out"
            .to_owned()
    } else if !resource.starts_with("nvidia.com/") {
        format!(
            "cannot compute on cards of {resource}, only on NVIDIA's; leave --gpu-resource out, or name one of nvidia.com/"
        )
    } else {
        return Ok(());
    };
    fail(Exit::Usage, format!("cannot render job {}: it {wrong}", job.name))
}

/// The configuration of the pods as TOML: what leads to volumes and topics, and what differs from the defaults.
fn configuration(settings: &Settings, args: &RenderArgs) -> Result<String> {
    let datafs = &settings.datafs;
    let Some(url) = &datafs.meta_url else {
        return fail(
            Exit::Usage,
            "cannot render manifests: pods share metadata on a PostgreSQL server; set datafs.meta_url",
        );
    };
    if url.redacted() != *url {
        return fail(
            Exit::Usage,
            "cannot render manifests: datafs.meta_url has a password, which manifests would show; leave it out, and name \
             its Secret with --database-secret",
        );
    }
    if !datafs
        .store_url
        .as_ref()
        .is_some_and(|url| ["s3://", "gs://", "az://"].iter().any(|kind| url.starts_with(*kind)))
    {
        return fail(
            Exit::Usage,
            "cannot render manifests: pods share file data in a bucket; set datafs.store_url to s3://, gs:// or az://",
        );
    }
    let known: BTreeSet<&str> = args.variables.iter().map(|(name, _, _)| name.as_str()).collect();
    for (table, values) in [
        ("datafs.store_options", &datafs.store_options),
        ("datafs.encryption_keys", &datafs.encryption_keys),
        ("streams.properties", &settings.streams.properties),
    ] {
        for (key, value) in values {
            check_secret(table, key, value, &known)?;
        }
    }
    let mut tables = toml::Table::new();
    let mut of_datafs = changed(datafs, &millrace_datafs::Config::default())?;
    of_datafs.retain(|key, _| !LOCAL_KEYS.contains(&key));
    of_datafs.insert("meta_schema".to_owned(), datafs.meta_schema.clone().into());
    tables.insert("datafs".to_owned(), of_datafs.into());
    if !settings.streams.is_embedded() {
        let mut of_streams = changed(&settings.streams, &millrace_streams::Config::default())?;
        of_streams.retain(|key, _| ["bootstrap_servers", "properties"].contains(&key));
        tables.insert("streams".to_owned(), of_streams.into());
    }
    let of_trainer = changed(&settings.trainer, &millrace_trainer::Config::default())?;
    if !of_trainer.is_empty() {
        tables.insert("trainer".to_owned(), of_trainer.into());
    }
    Ok(toml::to_string(&tables)?)
}

/// Refuses values that manifests would show, and references that lead nowhere in a pod.
fn check_secret(table: &str, key: &str, value: &Secret, known: &BTreeSet<&str>) -> Result<()> {
    let text = match value {
        Secret::Text(text) => Some(text.as_str()),
        _ => None,
    };
    let is_public = match table {
        "datafs.store_options" => is_public_store_option(key, text),
        "streams.properties" => is_public_property(key),
        _ => false,
    };
    let wrong = match value {
        Secret::Environment(from) if known.contains(from.env.as_str()) => return Ok(()),
        Secret::Environment(from) => {
            format!("comes from the variable {0}, which pods do not have; add --env {0}=SECRET:KEY", from.env)
        }
        Secret::File(_) => "is in a file of this machine; use { env = \"NAME\" } and --env NAME=SECRET:KEY".to_owned(),
        _ if !is_public => {
            "is a secret, which manifests would show; use --store-secret, or { env = \"NAME\" } and --env NAME=SECRET:KEY"
                .to_owned()
        }
        _ => return Ok(()),
    };
    fail(Exit::Usage, format!("cannot render manifests: {table}.{key} {wrong}"))
}

/// The keys of a table whose values are not the defaults.
fn changed<T: Serialize>(table: &T, default: &T) -> Result<toml::Table> {
    let default = toml::Table::try_from(default)?;
    let table = toml::Table::try_from(table)?;
    Ok(table.into_iter().filter(|(key, value)| default.get(key) != Some(value)).collect())
}

/// One of the two Jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Coordinator,
    Worker,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Coordinator => "coordinator",
            Part::Worker => "worker",
        }
    }
}

/// All that the objects say.
struct Training<'a> {
    args: &'a RenderArgs,
    image: &'a str,
    token_secret: &'a str,
    /// Name of the training, and the names of its objects up to the hash.
    key: String,
    base: String,
    config: String,
    job: String,
    workers: u32,
    /// Flags of the coordinator beyond those that every one has.
    flags: Vec<String>,
    /// Flags that change what the job computes; workers need them, too, to know whether it is complete.
    overrides: Vec<String>,
}

impl<'a> Training<'a> {
    fn new(args: &'a TrainArgs, job: &JobFile, config: String, text: String) -> Result<Training<'a>> {
        let render = &args.render;
        let key = match &render.training {
            Some(name) => name.clone(),
            None => match training(job.name.as_str()) {
                Ok(name) => name,
                Err(form) => {
                    return fail(
                        Exit::Usage,
                        format!(
                            "cannot render job {}: its name is no name of Kubernetes; add --training with another, and {form}",
                            job.name
                        ),
                    );
                }
            },
        };
        let count = |given: Option<u32>, in_job: Option<usize>| {
            given.or_else(|| in_job.and_then(|count| u32::try_from(count).ok())).unwrap_or(1)
        };
        let workers = count(args.workers, job.workers);
        let mut flags = vec![format!("--workers-min={}", count(args.workers_min, job.workers_min))];
        flags.extend(args.workers_max.map(|max| format!("--workers-max={max}")));
        let mut overrides: Vec<String> = args.seed.map(|seed| format!("--seed={seed}")).into_iter().collect();
        overrides.extend(args.device.map(|device| format!("--device={}", device.as_str())));
        flags.extend_from_slice(&overrides);
        Ok(Training {
            args: render,
            // Clap requires both with --render.
            image: render.image.as_deref().unwrap_or_default(),
            token_secret: render.token_secret.as_deref().unwrap_or_default(),
            base: base(&render.release, &key),
            key,
            config,
            job: text,
            workers,
            flags,
            overrides,
        })
    }

    fn objects(&self) -> Vec<Value> {
        let parts = [Part::Coordinator, Part::Worker];
        // Without the numbers of pods, which may change.
        let rules = (self.args.backoff_limit, self.args.replace_lost);
        let content = json!([self.config, self.job, rules, parts.map(|part| self.pod(part, ""))]);
        let mut hash = hex::encode(Sha256::digest(content.to_string()));
        hash.truncate(8);
        let config_map = format!("{}-{hash}", self.base);
        let mut objects = vec![
            json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": self.metadata(&config_map, None),
                "data": { "millrace.toml": self.config, "job.toml": self.job },
            }),
            // Leads workers to the coordinators: all of them, since only the one that leads listens.
            json!({
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": self.metadata(&self.base, None),
                "spec": {
                    "clusterIP": "None",
                    "publishNotReadyAddresses": true,
                    "selector": self.selector(Part::Coordinator),
                    "ports": [{ "name": "coordinator", "port": 7100 }],
                },
            }),
        ];
        objects.extend(parts.map(|part| self.job(part, &config_map)));
        objects
    }

    fn job(&self, part: Part, config_map: &str) -> Value {
        let count = match part {
            Part::Coordinator => self.args.standbys + 1,
            Part::Worker => self.workers,
        };
        let mut spec = json!({
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "suspend": self.args.suspend,
            "backoffLimitPerIndex": self.args.backoff_limit,
            "maxFailedIndexes": count,
            "ttlSecondsAfterFinished": 86_400,
            "template": { "metadata": { "labels": self.selector(part) }, "spec": self.pod(part, config_map) },
        });
        if self.args.replace_lost {
            spec["podReplacementPolicy"] = json!("TerminatingOrFailed");
        } else {
            spec["podReplacementPolicy"] = json!("Failed");
            spec["podFailurePolicy"] = json!({ "rules": [
                // Evictions and preemptions are no failures.
                { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] },
                // Wrong usage or configuration: no pod would do better.
                {
                    "action": "FailJob",
                    "onExitCodes": { "containerName": "millrace", "operator": "In", "values": [2] },
                },
            ] });
        }
        let name = format!("{config_map}-{}", &part.name()[..1]);
        json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": self.metadata(&name, Some(part)), "spec": spec })
    }

    /// The pod of a part. Where it is hashed, its ConfigMap has no name yet.
    fn pod(&self, part: Part, config_map: &str) -> Value {
        let mut pod = json!({
            "serviceAccountName": self.args.service_account,
            "automountServiceAccountToken": false,
            // Variables of services would be taken for settings.
            "enableServiceLinks": false,
            "securityContext": {
                "runAsNonRoot": true,
                "runAsUser": 10_001,
                "runAsGroup": 10_001,
                "fsGroup": 10_001,
                "seccompProfile": { "type": "RuntimeDefault" },
            },
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 60,
            "tolerations": self.tolerations(part),
            "topologySpreadConstraints": [{
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": { "matchLabels": self.selector(part) },
            }],
            "containers": [self.container(part)],
            "volumes": [
                { "name": "config", "configMap": { "name": config_map } },
                { "name": "token", "secret": { "secretName": self.token_secret, "defaultMode": 0o440 } },
                { "name": "home", "emptyDir": {} },
                { "name": "tmp", "emptyDir": {} },
            ],
        });
        if let Some(class) = &self.args.priority_class {
            pod["priorityClassName"] = json!(class);
        }
        if !self.args.node_selector.is_empty() {
            pod["nodeSelector"] = texts(&self.args.node_selector);
        }
        let nodes = self.node_expressions();
        if part == Part::Worker && !nodes.is_empty() {
            pod["affinity"] = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{ "matchExpressions": nodes }],
            } } });
        }
        pod
    }

    fn container(&self, part: Part) -> Value {
        let (args, port, resources) = match part {
            Part::Coordinator => (
                self.coordinator_args(),
                json!({ "name": "coordinator", "containerPort": 7100 }),
                json!({ "requests": { "cpu": "100m", "memory": "256Mi" }, "limits": { "memory": "1Gi" } }),
            ),
            Part::Worker => {
                let mut limits = texts(&self.args.limits);
                if let Some((resource, count)) = self.args.cards() {
                    limits[resource] = json!(count.to_string());
                }
                (
                    self.worker_args(),
                    json!({ "name": "ring", "containerPort": 7101 }),
                    json!({ "requests": texts(&self.args.requests), "limits": limits }),
                )
            }
        };
        json!({
            "name": "millrace",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "args": args,
            "ports": [port],
            "resources": resources,
            "env": self.variables(),
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            },
            "volumeMounts": [
                { "name": "config", "mountPath": "/etc/millrace", "readOnly": true },
                { "name": "token", "mountPath": "/etc/millrace-token", "readOnly": true },
                { "name": "home", "mountPath": "/var/lib/millrace" },
                { "name": "tmp", "mountPath": "/tmp" },
            ],
        })
    }

    fn coordinator_args(&self) -> Vec<String> {
        let common = [
            "train",
            "/etc/millrace/job.toml",
            "--listen=0.0.0.0:7100",
            "--advertise=$(POD_IP)",
            "--token-file=/etc/millrace-token/token",
            "--workers-local=0",
        ];
        let mut args: Vec<String> = common.map(str::to_owned).to_vec();
        args.extend_from_slice(&self.flags);
        args.push("--standby".to_owned());
        args
    }

    fn worker_args(&self) -> Vec<String> {
        let mut args = vec![
            "worker".to_owned(),
            format!("--join={}:7100", self.base),
            // A worker that comes after the end of the job ends with success.
            "--job=/etc/millrace/job.toml".to_owned(),
            "--token-file=/etc/millrace-token/token".to_owned(),
            "--listen-ring=0.0.0.0:7101".to_owned(),
            "--advertise=$(POD_IP)".to_owned(),
            // The end of the job alone is a success of the pod.
            "--exit-on-leave=75".to_owned(),
        ];
        args.extend_from_slice(&self.overrides);
        args
    }

    fn variables(&self) -> Vec<Value> {
        let secret = |variable: &str, name: &str, key: &str| json!({ "name": variable, "valueFrom": { "secretKeyRef": { "name": name, "key": key } } });
        let mut all = vec![
            json!({ "name": "MILLRACE_HOME", "value": "/var/lib/millrace/home" }),
            json!({ "name": "MILLRACE_CONFIG", "value": "/etc/millrace/millrace.toml" }),
            json!({ "name": "POD_IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } }),
        ];
        if let Some((name, key)) = &self.args.database_secret {
            all.push(secret("PGPASSWORD", name, key));
        }
        if let Some((name, id, key)) = &self.args.store_secret {
            all.push(secret("AWS_ACCESS_KEY_ID", name, id));
            all.push(secret("AWS_SECRET_ACCESS_KEY", name, key));
        }
        all.extend(self.args.variables.iter().map(|(variable, name, key)| secret(variable, name, key)));
        all
    }

    /// Pods leave lost nodes soon; workers may run on nodes with cards.
    fn tolerations(&self, part: Part) -> Vec<Value> {
        let lost = ["node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"].map(
            |key| json!({ "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10 }),
        );
        let mut all = lost.to_vec();
        if part == Part::Worker {
            let taint = |key: &String| json!({ "key": key, "operator": "Exists", "effect": "NoSchedule" });
            all.extend(self.args.tolerate.iter().map(taint));
        }
        all
    }

    /// Labels of the nodes with the wanted cards.
    fn node_expressions(&self) -> Vec<Value> {
        let mut all = Vec::new();
        if !self.args.gpu_product.is_empty() {
            let mut names = self.args.gpu_product.clone();
            if self.args.gpu_shared {
                names.extend(self.args.gpu_product.iter().map(|name| format!("{name}-SHARED")));
            }
            all.push(json!({ "key": "nvidia.com/gpu.product", "operator": "In", "values": names }));
        }
        for (label, above) in [
            ("nvidia.com/gpu.memory", self.args.gpu_memory_mib),
            ("nvidia.com/gpu.compute.major", self.args.gpu_compute_major),
        ] {
            if let Some(above) = above {
                all.push(json!({ "key": label, "operator": "Gt", "values": [above.to_string()] }));
            }
        }
        all
    }

    /// Labels of the pods of a part.
    fn selector(&self, part: Part) -> Value {
        json!({
            "app.kubernetes.io/name": "millrace",
            "app.kubernetes.io/instance": self.args.release,
            "app.kubernetes.io/component": part.name(),
            "millrace/training": self.key,
        })
    }

    /// The metadata of an object; that of a Job names its part.
    fn metadata(&self, name: &str, part: Option<Part>) -> Value {
        let mut labels = json!({
            "app.kubernetes.io/name": "millrace",
            "app.kubernetes.io/instance": self.args.release,
            "app.kubernetes.io/version": env!("CARGO_PKG_VERSION"),
            "app.kubernetes.io/managed-by": "millrace",
        });
        if let Some(part) = part {
            labels["app.kubernetes.io/component"] = json!(part.name());
            labels["millrace/training"] = json!(self.key);
            if let Some(queue) = &self.args.queue {
                labels["kueue.x-k8s.io/queue-name"] = json!(queue);
            }
        }
        json!({ "name": name, "namespace": self.args.namespace, "labels": labels })
    }
}

/// The first part of the names, as the chart makes it.
fn base(release: &str, key: &str) -> String {
    let cut = |text: &str, max: usize| text[..text.len().min(max)].trim_end_matches('-').to_owned();
    let name = if release.contains("millrace") { release.to_owned() } else { format!("{release}-millrace") };
    cut(&format!("{}-{key}", cut(&name, 40)), 48)
}

/// An object of texts.
fn texts(pairs: &[(String, String)]) -> Value {
    Value::Object(pairs.iter().map(|(key, value)| (key.clone(), json!(value))).collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use millrace_datafs::PUBLIC_STORE_OPTIONS;
    use millrace_streams::PUBLIC_SECURITY_PROPERTIES;
    use serde_json::Value;

    use super::{base, check_secret};

    #[test]
    fn values_of_options_that_are_not_listed_are_refused_without_being_shown() {
        let check = |table, key| check_secret(table, key, &"planted".into(), &BTreeSet::new());
        for key in ["account_key", "sas_key", "service_account_key", "master_key", "token", "proxy_url"] {
            let error = check("datafs.store_options", key).unwrap_err().to_string();
            assert!(error.contains(key) && !error.contains("planted"), "{error}");
        }
        for key in ["sasl.password", "ssl.key.pem", "ssl.key.password", "sasl.oauthbearer.config"] {
            let error = check("streams.properties", key).unwrap_err().to_string();
            assert!(error.contains(key) && !error.contains("planted"), "{error}");
        }
        assert!(check("datafs.encryption_keys", "region").is_err());
        check("datafs.store_options", "endpoint").unwrap();
        check("streams.properties", "security.protocol").unwrap();
    }

    #[test]
    fn the_chart_takes_the_same_options_of_stores_and_brokers() {
        let schema = include_str!("../../../deploy/helm/millrace/values.schema.json");
        let schema: Value = serde_json::from_str(schema).unwrap();
        let names = &schema["properties"]["store"]["properties"]["options"]["propertyNames"]["enum"];
        assert_eq!(*names, serde_json::json!(PUBLIC_STORE_OPTIONS));
        let names = &schema["properties"]["kafka"]["properties"]["properties"]["properties"];
        let names: Vec<&str> = names.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(names, PUBLIC_SECURITY_PROPERTIES);
    }

    #[test]
    fn names_are_those_of_the_chart() {
        assert_eq!(base("millrace", "digits"), "millrace-digits");
        assert_eq!(base("vision", "digits"), "vision-millrace-digits");
        let long = base(&"r".repeat(40), &"k".repeat(32));
        assert_eq!(long, format!("{}-{}", "r".repeat(40), "k".repeat(7)));
        assert_eq!(base(&"r".repeat(31), &format!("{}-x", "k".repeat(7))).len(), 48);
    }
}
