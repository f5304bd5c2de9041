//! Input files of `millrace predict`: found at the start, with the format of each.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::Result;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use super::images;
use crate::cli::{PredictArgs, RecordFormat};
use crate::failure::{Exit, fail};

/// Finds the files, or standard input without files. The file name determines the format unless the flag sets
/// it. A folder stands for the images in it.
pub(super) fn open(args: &PredictArgs) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for path in &args.files {
        if path.is_dir() && args.format.is_none_or(|format| format == RecordFormat::Image) {
            for image in images::of_folder(path)? {
                sources.push(Source::open(Some(&image), args.format)?);
            }
        } else {
            sources.push(Source::open(Some(path), args.format)?);
        }
    }
    if args.files.is_empty() {
        sources.push(Source::open(None, args.format)?);
    }
    if are_images(&sources) {
        let without =
            args.label.as_ref().map(|_| "--label").or((!args.input.is_empty()).then_some("--input"));
        if let Some(flag) = without {
            return fail(Exit::Usage, format!("{flag} names a field, images have none"));
        }
    } else if sources.iter().any(|source| source.format == RecordFormat::Image) {
        return fail(Exit::Usage, "images and records go to the model by two commands, not in one");
    } else if let Some(flag) = args.images.first_given() {
        return fail(Exit::Usage, format!("{flag} is for images, the files hold records"));
    }
    Ok(sources)
}

/// Finds files of records; the file name determines the format unless `format` is set.
pub(super) fn of_records(paths: &[PathBuf], format: Option<RecordFormat>) -> Result<Vec<Source>> {
    if let Some(folder) = paths.iter().find(|path| path.is_dir()) {
        let folder = folder.display();
        return fail(Exit::Usage, format!("{folder} is a folder, files of records are expected"));
    }
    let sources = paths.iter().map(|path| Source::open(Some(path), format)).collect::<Result<Vec<_>>>()?;
    match sources.iter().find(|source| source.format == RecordFormat::Image) {
        Some(image) => fail(Exit::Usage, format!("{} is an image, records are expected", image.name)),
        None => Ok(sources),
    }
}

/// Whether the records are images: either all of them are, or none.
pub(super) fn are_images(sources: &[Source]) -> bool {
    sources.iter().all(|source| source.format == RecordFormat::Image)
}

/// Number of records, if the files state it in advance.
pub(super) fn records(sources: &[Source]) -> Option<u64> {
    sources.iter().map(Source::records).sum()
}

/// An input file, or standard input.
pub(super) struct Source {
    pub(super) name: String,
    pub(super) format: RecordFormat,
    pub(super) content: Content,
}

/// The source of a file's bytes.
pub(super) enum Content {
    Standard,
    Open(File),
    /// Opened when its turn comes: the images may outnumber the limit of open files.
    Named(PathBuf),
}

impl Source {
    /// Opens a file; its name determines the format unless `format` is set.
    fn open(path: Option<&Path>, format: Option<RecordFormat>) -> Result<Source> {
        let extension = path.and_then(Path::extension).and_then(|extension| extension.to_str());
        let format = format.unwrap_or(match extension {
            Some("json") => RecordFormat::Json,
            Some("csv") => RecordFormat::Csv,
            Some("parquet") => RecordFormat::Parquet,
            _ if path.is_some_and(images::is_image) => RecordFormat::Image,
            _ => RecordFormat::Jsonl,
        });
        let Some(path) = path else {
            return Ok(Source { name: "standard input".into(), format, content: Content::Standard });
        };
        let name = path.display().to_string();
        let content = match format {
            // Checks now that the file exists.
            RecordFormat::Image => std::fs::metadata(path).map(|_| Content::Named(path.to_owned())),
            _ => File::open(path).map(Content::Open),
        };
        match content {
            Ok(content) => Ok(Source { name, format, content }),
            Err(error) => unreadable(&name, &error),
        }
    }

    fn records(&self) -> Option<u64> {
        if self.format == RecordFormat::Image {
            return Some(1);
        }
        let (RecordFormat::Parquet, Content::Open(file)) = (self.format, &self.content) else { return None };
        let reader = ParquetRecordBatchReaderBuilder::try_new(file.try_clone().ok()?).ok()?;
        u64::try_from(reader.metadata().file_metadata().num_rows()).ok()
    }

    /// The file's bytes; works once.
    pub(super) fn reader(&mut self) -> Result<Box<dyn BufRead>> {
        Ok(match std::mem::replace(&mut self.content, Content::Standard) {
            Content::Standard => Box::new(BufReader::new(std::io::stdin())),
            Content::Open(file) => Box::new(BufReader::new(file)),
            Content::Named(path) => match File::open(&path) {
                Ok(file) => Box::new(BufReader::new(file)),
                Err(error) => return unreadable(&self.name, &error),
            },
        })
    }
}

fn unreadable<T>(name: &str, error: &std::io::Error) -> Result<T> {
    let missing = error.kind() == std::io::ErrorKind::NotFound;
    let exit = if missing { Exit::NotFound } else { Exit::Failed };
    fail(exit, format!("cannot read {name}: {error}"))
}
