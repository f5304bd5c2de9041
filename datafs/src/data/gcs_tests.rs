//! Tests of the object pool over Google's interface, against an in-memory server that supports what objects
//! need (put, get, ranges, lists, deletes, multipart uploads).
use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use super::s3_tests::{pattern, pool_with};
use super::upload::PART_BYTES;
use super::writer::FRAMED_BYTES_MAX;
use super::*;
use crate::config::{Config, Secret};

const SESSION: u64 = 0xfeed_0000_0000_0007;

/// The server's state.
#[derive(Debug, Default)]
struct Bucket {
    objects: BTreeMap<String, Vec<u8>>,
    /// Parts by upload and number.
    parts: BTreeMap<(u64, u64), Vec<u8>>,
    uploads: u64,
}

/// One request.
struct Request {
    method: String,
    key: String,
    query: HashMap<String, String>,
    headers: HashMap<String, String>,
    body: Vec<u8>,
}

/// Listens until the process ends; its threads end with their connections.
fn serve() -> (String, Arc<Mutex<Bucket>>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let bucket = Arc::new(Mutex::new(Bucket::default()));
    let shared = Arc::clone(&bucket);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let bucket = Arc::clone(&shared);
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                while let Some(request) = read(&mut reader) {
                    answer(&stream, &request, &mut bucket.lock().unwrap());
                }
            });
        }
    });
    (url, bucket)
}

fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = || {
        let mut line = String::new();
        (reader.read_line(&mut line).ok()? > 0).then(|| line.trim_end().to_owned())
    };
    let first = line()?;
    let mut words = first.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let mut headers = HashMap::new();
    loop {
        let line = line()?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let mut body = vec![0; headers.get("content-length").map_or(0, |len| len.parse().unwrap())];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pair = |part: &str| {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        (decoded(name), decoded(value))
    };
    let query = query.split('&').filter(|part| !part.is_empty()).map(pair).collect();
    let path = decoded(path);
    let key = path.trim_start_matches('/').split_once('/').map_or("", |(_, key)| key).to_owned();
    Some(Request { method, key, query, headers, body })
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, more)) = rest.split_first() {
        rest = more;
        match (first, more.get(..2)) {
            (b'%', Some(digits)) => {
                bytes.push(u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap());
                rest = &more[2..];
            }
            _ => bytes.push(*first),
        }
    }
    String::from_utf8(bytes).unwrap()
}

fn answer(mut stream: &TcpStream, request: &Request, bucket: &mut Bucket) {
    let (status, extra, body) = carry_out(request, bucket);
    let len = match (&*request.method, bucket.objects.get(&request.key)) {
        ("HEAD", Some(object)) => object.len(),
        _ => body.len(),
    };
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {len}\r\nETag: \"tag\"\r\nx-goog-generation: 1\r\n\
         Last-Modified: Tue, 15 Nov 1994 12:45:26 GMT\r\n{extra}\r\n"
    );
    // Fails when the client has disconnected.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| match &*request.method {
        "HEAD" => Ok(()),
        _ => stream.write_all(&body),
    });
}

fn carry_out(request: &Request, bucket: &mut Bucket) -> (u16, String, Vec<u8>) {
    let ok = |body: String| (200, String::new(), body.into_bytes());
    let done = |status| (status, String::new(), Vec::new());
    let number = |name: &str| request.query.get(name).and_then(|value| value.parse::<u64>().ok());
    let key = &request.key;
    match (&*request.method, number("uploadId")) {
        ("PUT", Some(upload)) => {
            bucket.parts.insert((upload, number("partNumber").unwrap()), request.body.clone());
            done(200)
        }
        ("PUT", None) => {
            let only_new = request.headers.get("x-goog-if-generation-match").is_some_and(|it| it == "0");
            if only_new && bucket.objects.contains_key(key) {
                return done(412);
            }
            bucket.objects.insert(key.clone(), request.body.clone());
            done(200)
        }
        ("POST", None) => {
            bucket.uploads += 1;
            let (id, name) = (bucket.uploads, "InitiateMultipartUploadResult");
            // The upload exists from now on, without parts.
            bucket.parts.insert((id, 0), Vec::new());
            ok(format!("<{name}><Bucket>b</Bucket><Key>k</Key><UploadId>{id}</UploadId></{name}>"))
        }
        ("POST", Some(upload)) => {
            let parts = bucket.parts.range((upload, 0)..(upload + 1, 0));
            let whole = parts.flat_map(|(_, part)| part.clone()).collect();
            bucket.parts.retain(|(of, _), _| *of != upload);
            bucket.objects.insert(key.clone(), whole);
            ok("<CompleteMultipartUploadResult><ETag>tag</ETag></CompleteMultipartUploadResult>".into())
        }
        ("DELETE", Some(upload)) => {
            bucket.parts.retain(|(of, _), _| *of != upload);
            done(204)
        }
        ("DELETE", None) => done(if bucket.objects.remove(key).is_some() { 204 } else { 404 }),
        ("GET", _) if key.is_empty() => ok(list(request, bucket)),
        (_, _) => match bucket.objects.get(key) {
            None => done(404),
            Some(object) => get(request.headers.get("range"), object),
        },
    }
}

fn get(range: Option<&String>, object: &[u8]) -> (u16, String, Vec<u8>) {
    let range = range.and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let Some((start, end)) = range else { return (200, String::new(), object.to_vec()) };
    let start: usize = start.parse().unwrap();
    let end = end.parse::<usize>().map_or(object.len(), |last| (last + 1).min(object.len()));
    if start >= end {
        return (416, String::new(), Vec::new());
    }
    let header = format!("Content-Range: bytes {start}-{}/{}\r\n", end - 1, object.len());
    (206, header, object[start..end].to_vec())
}

fn list(request: &Request, bucket: &Bucket) -> String {
    let prefix = request.query.get("prefix").map_or("", String::as_str);
    let after = request.query.get("start-after").map_or("", String::as_str);
    let entry = |(key, object): (&String, &Vec<u8>)| {
        let (size, time) = (object.len(), "2026-01-02T03:04:05.000Z");
        format!(
            "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>{time}</LastModified>\
             <ETag>tag</ETag></Contents>"
        )
    };
    let there = bucket.objects.iter().filter(|(key, _)| key.starts_with(prefix) && key.as_str() > after);
    format!("<ListBucketResult>{}</ListBucketResult>", there.map(entry).collect::<String>())
}

fn config(url: &str) -> Config {
    let account = format!(
        "{{\"private_key\": \"\", \"private_key_id\": \"\", \"client_email\": \"\", \
         \"disable_oauth\": true, \"gcs_base_url\": \"{url}\"}}"
    );
    let options = [("service_account_key", account), ("allow_http", "true".to_owned())];
    Config {
        store_url: Some("gs://bucket/some/prefix".into()),
        store_options: options.map(|(k, v)| (k.to_owned(), Secret::Text(v))).into(),
        cache_bytes_max: 0,
        ..Config::default()
    }
}

#[test]
fn what_is_written_to_a_bucket_of_google_s_is_read_back_listed_and_deleted() {
    let (url, bucket) = serve();
    let config = config(&url);
    let pool = pool_with(&config, SESSION);
    let names = || bucket.lock().unwrap().objects.keys().cloned().collect::<Vec<_>>();
    let mut ids = Vec::new();
    for len in [0, 1, 70_000, FRAMED_BYTES_MAX + 1, 2 * PART_BYTES + 7] {
        let bytes = pattern(len);
        let stored = pool.put(&bytes).unwrap();
        assert!(pool.read(stored.id, 0..len as u64).unwrap() == bytes, "{len}");
        let (a, b) = (len / 3, len - len / 5);
        assert!(pool.read(stored.id, a as u64..b as u64).unwrap() == bytes[a..b], "{len}");
        ids.push(stored.id);
    }
    assert!(names().iter().all(|name| name.starts_with("some/prefix/objects/")), "{:?}", names());
    assert_eq!(bucket.lock().unwrap().parts.len(), 0);
    ids.sort();
    assert_eq!(pool.list_session(SESSION).unwrap(), ids);
    assert_eq!(pool.list_session(SESSION + 1).unwrap(), []);
    let mut seen = 0;
    pool.survey(&mut |_, is_data, _| seen += usize::from(is_data)).unwrap();
    assert_eq!(seen, ids.len());
    for id in ids {
        pool.delete(id).unwrap();
        pool.delete(id).unwrap();
        assert!(matches!(pool.read(id, 0..0), Err(ObjectError::Missing { .. })));
    }
    assert_eq!(names(), Vec::<String>::new());
    // Dropped uploads, and those of dead processes, are aborted.
    let begin = || {
        let mut writer = pool.writer(&Codec::default()).unwrap();
        writer.append(&pattern(3 * PART_BYTES)).unwrap();
        writer
    };
    drop(begin());
    assert_eq!((names().len(), bucket.lock().unwrap().parts.len()), (0, 0));
    std::mem::forget(begin());
    assert_eq!(names().len(), 1, "the note of the upload");
    assert_eq!(pool_with(&config, SESSION + 1).list_session(SESSION).unwrap(), []);
    assert_eq!((names().len(), bucket.lock().unwrap().parts.len()), (0, 0));
}
