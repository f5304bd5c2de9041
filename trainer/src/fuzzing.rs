//! Entry points of the fuzz targets (`fuzz/`) into the decoders of this crate. Not part of the interface.

use crate::collective::frame::{HEADER_BYTES, Header, Kind, PAYLOAD_BYTES_MAX};
use crate::engine::{Param, ParamLayout};
use crate::state::RunState;

/// Decodes the state of a run whose model has two small parameters and a state, and encodes it again; `None` when it is
/// refused.
pub fn state(bytes: &[u8]) -> Option<Vec<u8>> {
    let layout = layout();
    RunState::decode(&layout, bytes).ok()?.encode(&layout).ok()
}

/// The state of a run that has just begun, encoded.
pub fn first_state() -> Vec<u8> {
    let layout = layout();
    let state = RunState {
        step: 7,
        weights: vec![0.5; layout.elements()],
        optimizer: crate::optim::OptimizerState {
            step: 7,
            slots: vec![("momentum".into(), vec![0.25; layout.elements()])],
        },
        ledger: crate::ledger::Ledger::default(),
        fraction_bits: Some(20),
        evaluations: Vec::new(),
        best: None,
        states: vec![0.125; layout.state_elements()],
        best_states: Vec::new(),
        ema: None,
        loss_scale: None,
    };
    state.encode(&layout).unwrap_or_default()
}

fn layout() -> ParamLayout {
    let param =
        |name: &str, shape: &[usize], range| Param { name: name.into(), shape: shape.to_vec(), range };
    ParamLayout {
        params: vec![param("w", &[2, 3], 0..6), param("b", &[3], 6..9)],
        states: vec![param("mean", &[2], 0..2)],
    }
}

/// Decodes the header of a ring frame, after its checksum was set right; panics where the header is another one
/// after it was encoded.
pub fn frame(header: &[u8; HEADER_BYTES]) {
    let mut header = *header;
    let (fields, checksum) = header.split_at_mut(HEADER_BYTES - 4);
    checksum.copy_from_slice(&crc32c::crc32c(fields).to_le_bytes());
    let Ok(received) = Header::decode(&header) else { return };
    assert!(received.bytes <= PAYLOAD_BYTES_MAX, "a payload is bounded");
    let again = Header::decode(&received.header.encode_as(b"payload", received.is_shared));
    let again = again.map(|again| (again.header, again.bytes, again.is_shared));
    assert_eq!(again, Ok((received.header, 7, received.is_shared)));
}

/// The header of a frame, for seeds.
pub fn first_frame() -> [u8; HEADER_BYTES] {
    Header { kind: Kind::Reduce, rank: 1, epoch: 2, step: 3, bucket: 4, phase: 5 }.encode(b"payload")
}
