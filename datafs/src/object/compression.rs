//! Compression algorithms of file data and their codes in the formats.

use std::fmt;
use std::str::FromStr;

/// How a volume's file data is compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// LZ4: fast, for data that shrinks easily.
    Lz4,
    /// Zstandard at a level from 1 (fast) to 19 (small).
    Zstd {
        /// The level.
        level: u8,
    },
}

/// The level when none is named.
const ZSTD_LEVEL: u8 = 3;

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd { level } => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    /// `none`, `lz4`, `zstd` or `zstd:LEVEL`.
    fn from_str(text: &str) -> Result<Compression, String> {
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            None if text == "lz4" => Ok(Self::Lz4),
            None if text == "zstd" => Ok(Self::Zstd { level: ZSTD_LEVEL }),
            Some(("zstd", level)) => match level.parse() {
                Ok(level @ 1..=19) => Ok(Self::Zstd { level }),
                _ => Err(format!("zstd has levels from 1 to 19, not {level:?}")),
            },
            _ => Err(format!("{text:?} is no compression: write none, lz4, zstd or zstd:LEVEL")),
        }
    }
}

impl serde::Serialize for Compression {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Compression {
    /// The algorithm's code in the formats; readers do not need the level.
    pub(crate) fn to_byte(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Lz4 => 1,
            Self::Zstd { .. } => 2,
        }
    }

    /// The level of Zstandard, else 0.
    pub(crate) fn level(self) -> u8 {
        if let Self::Zstd { level } = self { level } else { 0 }
    }

    pub(crate) fn from_parts(byte: u8, level: u8) -> Option<Compression> {
        match Self::from_byte(byte)? {
            Self::Zstd { .. } => (1..=19).contains(&level).then_some(Self::Zstd { level }),
            other => (level == 0).then_some(other),
        }
    }

    pub(crate) fn from_byte(byte: u8) -> Option<Compression> {
        match byte {
            0 => Some(Self::None),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd { level: ZSTD_LEVEL }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressions_are_named() {
        for (text, compression) in [
            ("none", Compression::None),
            ("lz4", Compression::Lz4),
            ("zstd", Compression::Zstd { level: 3 }),
            ("zstd:19", Compression::Zstd { level: 19 }),
        ] {
            assert_eq!(text.parse(), Ok(compression));
            assert_eq!(compression.to_string().parse(), Ok(compression));
        }
        for wrong in ["", "gzip", "zstd:0", "zstd:20", "zstd:x", "lz4:3"] {
            assert!(wrong.parse::<Compression>().is_err(), "{wrong}");
        }
    }
}
