//! Positions in an order: the identity that plans with other sizes of a batch share.

use crate::feed::error::{FeedError, Result};
use crate::feed::order::Order;
use crate::feed::plan::{Plan, PlanId, PlanOptions, record, sizing};

impl Plan {
    /// The hash of the sequence of rows: the rows, the seed, the lanes and the window, but not the size of a batch (that
    /// too with buckets).
    /// Plans with one order have the same row at each place, so a number of rows is a position in all of them.
    pub fn order_id(&self) -> PlanId {
        self.order_with(self.order.lanes, self.order.window)
    }

    /// The rows of this plan, beside the dataset.
    pub(super) fn contents(&self) -> record::Contents<'_> {
        record::Contents {
            parts: self.has_parts().then_some(&self.group_rows[..]),
            selected: self.selected.as_deref(),
            packing: self.packing(),
            buckets: self.buckets.as_deref(),
        }
    }

    fn order_with(&self, lanes: u64, window: u64) -> PlanId {
        let rows =
            self.rows_id.get_or_init(|| record::rows_id(&self.dataset, &self.source, &self.contents()));
        // Buckets are sorted within blocks of batches.
        let batch = self.buckets.as_ref().map(|_| self.order.batch);
        record::order_id(rows, self.order.seed, lanes, window, batch)
    }

    /// A plan with the batches of this one and the order `order`, in which another plan of the same rows has counted;
    /// `options` are those of this plan. A position of that plan is one of the result.
    ///
    /// Plans take the greatest number of lanes that divides their batch, so another batch can mean other lanes.
    ///
    /// # Errors
    /// [`FeedError::OtherOrder`] for an order of other rows, another seed or other sizes of the shuffle.
    /// [`FeedError::Invalid`] when the lanes of the order do not divide the batch, and for another order of a plan with
    /// buckets.
    pub fn in_order(&self, order: PlanId, options: &PlanOptions) -> Result<Plan> {
        if self.buckets.is_some() && order != self.order_id() {
            return Err(FeedError::invalid(format!(
                "the state belongs to order {order}, this feed reads order {}; a feed with buckets goes on with the same \
                 batch_rows, buckets, snapshot, rows and seed only",
                self.order_id()
            )));
        }
        let lanes_max = u64::from(options.lanes).min(self.order.rows).max(1);
        let is_uneven = sizing::has_uneven_rows(&self.dataset);
        let found = (1..=lanes_max).find_map(|lanes| {
            // With as many rows in a batch as lanes, the plan has these lanes or does not allow them.
            let asked = PlanOptions { lanes: lanes as u32, batch_rows: lanes as usize, ..options.clone() };
            let (given, window) = sizing::lanes_and_window(&self.groups, is_uneven, &asked);
            (given == lanes && self.order_with(lanes, window) == order).then_some((lanes, window))
        });
        let Some((lanes, window)) = found else {
            return Err(FeedError::OtherOrder { order, plan: self.order_id() });
        };
        let batch = self.order.batch;
        if !batch.is_multiple_of(lanes) {
            return Err(FeedError::invalid(format!(
                "the state counts rows of an order with {lanes} lanes, which do not divide batch_rows = {batch}; take a \
                 multiple of {lanes}"
            )));
        }
        let order = Order { lanes, window, ..self.order };
        Ok(Plan {
            id: record::plan_id(&self.dataset, &self.source, &order, &self.contents()),
            working_set_bytes: sizing::working_set_bytes(&self.groups, is_uneven, lanes, window),
            order,
            ..self.clone()
        })
    }
}
