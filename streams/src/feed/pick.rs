//! Row lookup for a batch: from positions of lanes to windows, from windows to row groups.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::feed::Plan;
use crate::feed::hash::NumberMap;
use crate::feed::order::{EpochLayout, Window};
use crate::feed::permutation::Permutation;
use crate::feed::places::LanePositions;

/// Layouts of recent epochs that are kept: the current one, the next one for prefetching, and those
/// of a reader that lags behind.
const LAYOUTS_KEPT: usize = 4;
/// A window that overlaps more row groups than this marks only those as used that a batch touched.
const NEARBY_MAX: usize = 16;

/// The rows of a batch, with their row groups.
pub(crate) struct Picks {
    /// The row groups, each once.
    pub(crate) groups: Vec<u32>,
    /// Row groups that the windows of the batch overlap.
    pub(crate) nearby: Vec<u32>,
    /// For each row the index into `groups` and the row inside.
    pub(crate) index: Vec<(usize, usize)>,
    /// Global row index of each row.
    pub(crate) rows: Vec<u64>,
    /// Epoch of each row.
    pub(crate) epochs: Vec<u64>,
}

/// Turns slots into rows; remembers the last window of each lane.
pub(crate) struct Picker {
    plan: Arc<Plan>,
    layouts: Mutex<VecDeque<(u64, Arc<EpochLayout>)>>,
    /// Per lane, the window that was read last: most batches stay in it.
    windows: Mutex<NumberMap<u64, Arc<LaneWindow>>>,
}

/// A window with all that is needed to find its rows.
struct LaneWindow {
    window: Window,
    /// Positions of the lane that lie in the window.
    positions: Range<u64>,
    shuffle: Permutation,
    layout: Arc<EpochLayout>,
    /// Places of the layout that the window overlaps.
    places: Range<usize>,
}

impl Picker {
    pub(crate) fn new(plan: Arc<Plan>) -> Self {
        Self { plan, layouts: Mutex::default(), windows: Mutex::default() }
    }

    /// The layout of an epoch, made once for the recent ones.
    pub(crate) fn layout(&self, epoch: u64) -> Arc<EpochLayout> {
        let mut layouts = self.layouts.lock();
        if let Some((_, found)) = layouts.iter().find(|(e, _)| *e == epoch) {
            return Arc::clone(found);
        }
        let layout = Arc::new(self.plan.layout(epoch));
        layouts.push_back((epoch, Arc::clone(&layout)));
        if layouts.len() > LAYOUTS_KEPT {
            layouts.pop_front();
        }
        layout
    }

    /// Finds the rows at some positions of lanes, `rows` in number.
    pub(crate) fn pick(&self, lanes: &[LanePositions], rows: usize) -> Picks {
        let mut picks = Picks {
            groups: Vec::new(),
            nearby: Vec::new(),
            index: Vec::with_capacity(rows),
            rows: Vec::with_capacity(rows),
            epochs: Vec::with_capacity(rows),
        };
        let mut source_of = NumberMap::default();
        for (window, positions) in self.windows_of(lanes) {
            window.pick(positions, &self.plan, &mut source_of, &mut picks);
        }
        picks
    }

    /// The windows that positions of lanes touch, in their order, each with the positions in it.
    fn windows_of(&self, lanes: &[LanePositions]) -> Vec<(Arc<LaneWindow>, Range<u64>)> {
        let mut found = Vec::new();
        let mut known = self.windows.lock();
        for (lane, positions) in lanes {
            let (lane, mut positions) = (*lane, positions.clone());
            while !positions.is_empty() {
                let window = match known.get(&lane) {
                    Some(window) if window.positions.contains(&positions.start) => Arc::clone(window),
                    _ => {
                        let window = Arc::new(self.lane_window(lane, positions.start));
                        known.insert(lane, Arc::clone(&window));
                        window
                    }
                };
                let end = window.positions.end.min(positions.end);
                found.push((window, positions.start..end));
                positions.start = end;
            }
        }
        found
    }

    fn lane_window(&self, lane: u64, position: u64) -> LaneWindow {
        let order = self.plan.order();
        let window = order.window_at(lane, position);
        let first = position - window.offset;
        let layout = self.layout(window.epoch);
        LaneWindow {
            window,
            positions: first..first + window.rows,
            shuffle: order.shuffle(&window),
            places: layout.places(window.start, window.rows),
            layout,
        }
    }
}

impl LaneWindow {
    fn pick(
        &self,
        positions: Range<u64>,
        plan: &Plan,
        source_of: &mut NumberMap<u32, usize>,
        picks: &mut Picks,
    ) {
        const UNSET: usize = usize::MAX;
        let (layout, places) = (&self.layout, self.places.clone());
        let few = places.len() <= NEARBY_MAX;
        if few {
            picks.nearby.extend_from_slice(&layout.groups[places.clone()]);
        }
        let mut few_sources = [(UNSET, 0u64); NEARBY_MAX];
        let mut many_sources = Vec::new();
        let sources = if few {
            &mut few_sources[..places.len()]
        } else {
            many_sources.resize(places.len(), (UNSET, 0));
            &mut many_sources[..]
        };
        for position in positions {
            let row = self.window.start + self.shuffle.apply(position - self.positions.start);
            let place = if few {
                let mut place = places.start;
                while layout.starts[place + 1] <= row {
                    place += 1;
                }
                place
            } else {
                layout.place_of(row)
            };
            let (source, base) = &mut sources[place - places.start];
            if *source == UNSET {
                let group = layout.groups[place];
                *base = plan.base(group);
                *source = *source_of.entry(group).or_insert_with(|| {
                    picks.groups.push(group);
                    picks.groups.len() - 1
                });
            }
            let within = row - layout.starts[place];
            picks.index.push((*source, within as usize));
            picks.rows.push(plan.dataset_row(*base + within, layout.groups[place]));
            picks.epochs.push(self.window.epoch);
        }
    }
}
