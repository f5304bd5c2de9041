//! Headers of a consumed record, read out of librdkafka's memory.
//!
//! Kafka header names are bytes. The reader of the rdkafka crate panics on a name that is not UTF-8, which
//! would end the consumer at this record forever. This reader replaces invalid UTF-8 by U+FFFD, as the Java
//! clients do.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ffi::{CStr, c_void};
use std::ptr;

use rdkafka::bindings::{rd_kafka_header_get_all, rd_kafka_headers_t, rd_kafka_message_headers};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaErrorCode as Code;

/// Name and value; `None` is a null value.
pub(crate) type Header<'m> = (Cow<'m, str>, Option<&'m [u8]>);

/// The headers of a record in their order.
///
/// # Errors
/// The library's code where it cannot read them.
pub(crate) fn headers<'m>(
    message: &'m BorrowedMessage<'_>,
) -> Result<impl Iterator<Item = Header<'m>>, Code> {
    let mut list: *mut rd_kafka_headers_t = ptr::null_mut();
    // SAFETY: the message is alive while it is borrowed. The call writes the pointer to its headers, which the
    // message owns, or leaves it null.
    let code = Code::from(unsafe { rd_kafka_message_headers(message.ptr(), &mut list) });
    match code {
        Code::NoError | Code::NoEnt => {}
        code => return Err(code),
    }
    Ok((0..).map_while(move |index| {
        if list.is_null() {
            return None;
        }
        // SAFETY: the list is not null and belongs to the message, which is borrowed for 'm.
        unsafe { header_at(list, index) }
    }))
}

/// The header at `index`; `None` after the last one.
///
/// # Safety
/// `list` must point to headers that stay as they are for `'m`.
unsafe fn header_at<'m>(list: *const rd_kafka_headers_t, index: usize) -> Option<Header<'m>> {
    let mut name = ptr::null();
    let mut value: *const c_void = ptr::null();
    let mut bytes = 0;
    // SAFETY: the caller vouches for the list; the call writes the three places.
    let code = Code::from(unsafe { rd_kafka_header_get_all(list, index, &mut name, &mut value, &mut bytes) });
    if code != Code::NoError || name.is_null() {
        return None;
    }
    // SAFETY: librdkafka ends each name with a NUL, inside the list's memory.
    let name = unsafe { CStr::from_ptr(name) };
    // SAFETY: a value that is not null has that many bytes, inside the list's memory.
    let value = (!value.is_null()).then(|| unsafe { std::slice::from_raw_parts(value.cast::<u8>(), bytes) });
    Some((String::from_utf8_lossy(name.to_bytes()), value))
}
