//! Fixed binary encoding of metadata records: big-endian integers and length-prefixed bytes.

use crate::error::{Error, Result};

/// Builds a record.
#[derive(Debug, Default)]
pub(crate) struct Encoder(Vec<u8>);

impl Encoder {
    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn i64(mut self, value: i64) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// Length (32 bits) and bytes; records are far below 4 GiB.
    pub(crate) fn bytes(self, value: &[u8]) -> Self {
        let mut next = self.u32(value.len() as u32);
        next.0.extend_from_slice(value);
        next
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Decodes a record. `what` names the record in errors.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Decoder { rest: bytes, what }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let Some((now, rest)) = self.rest.split_at_checked(len) else {
            return Err(self.damaged("the record is too short"));
        };
        self.rest = rest;
        Ok(now)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_be_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    pub(crate) fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_be_bytes(self.array()?))
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    pub(crate) fn string(&mut self) -> Result<String> {
        let bytes = self.bytes()?.to_vec();
        String::from_utf8(bytes).map_err(|_| self.damaged("text is not UTF-8"))
    }

    /// Whether all bytes were read.
    pub(crate) fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn finish(self) -> Result<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.damaged("the record is too long")) }
    }

    pub(crate) fn damaged(&self, reason: &str) -> Error {
        Error::corrupt(self.what, reason)
    }
}
