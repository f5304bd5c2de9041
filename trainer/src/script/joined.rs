//! A joined machine's part in a script job: its node behind a connection.
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::messages::{Assignment, Order, Report, decode, encode};
use super::node::{self, Ending, NodeSettings};
use crate::elastic::proto::{self, from_worker, to_worker};
use crate::elastic::session::AcceptedSession;
use crate::error::{Error, Result};

/// Orders and reports that wait.
const QUEUED: usize = 64;

/// Whether an assignment is that of a script job; native ones are other objects.
pub(crate) fn is_script(assignment: &str) -> bool {
    serde_json::from_str::<Assignment>(assignment).is_ok()
}

/// How a session with a coordinator ended.
pub(crate) enum SessionEnd {
    /// The job is over.
    Done,
    /// This machine was asked to leave.
    Left,
    /// The coordinator is gone: another one, or the same, may come.
    Lost(Error),
    /// The job failed, or this machine cannot run the script.
    Failed(Error),
}

/// Takes part in a script job until the session ends. All processes have ended then.
///
/// # Errors
/// As [`node::serve`].
pub(crate) fn serve(
    runtime: &Handle,
    session: AcceptedSession,
    settings: NodeSettings,
    leave: &CancellationToken,
) -> Result<SessionEnd> {
    let (address, outgoing, mut incoming) = session.into_parts();
    let (orders, own) = mpsc::channel::<Order>(QUEUED);
    let (told, mut reports) = mpsc::channel::<Report>(QUEUED);
    let reader = runtime.spawn(async move {
        loop {
            let message = match incoming.message().await {
                Ok(Some(proto::ToWorker { message: Some(to_worker::Message::Script(message)) })) => message,
                Ok(Some(_)) => return "it sent a message that is none of a script job".to_owned(),
                Ok(None) => return "it closed the connection".to_owned(),
                Err(status) => return format!("the connection broke ({})", status.message()),
            };
            let order = match decode::<Order>(&message) {
                Ok(order) => order,
                Err(reason) => return reason,
            };
            if orders.send(order).await.is_err() {
                return "this node has ended".to_owned();
            }
        }
    });
    let writer = runtime.spawn(async move {
        while let Some(report) = reports.recv().await {
            let Ok(message) = encode(&report) else { return };
            let message = proto::FromWorker { message: Some(from_worker::Message::Script(message)) };
            if outgoing.send(message).await.is_err() {
                // Further reports have no receiver, which must not block the node.
                reports.close();
                return;
            }
        }
    });
    let ending = runtime.block_on(node::serve(settings, own, told, leave.clone()));
    // The last report is on its way before the stream closes.
    let last_report = std::time::Duration::from_secs(2);
    drop(runtime.block_on(async { tokio::time::timeout(last_report, writer).await }));
    Ok(match ending? {
        Ending::Done(None) => SessionEnd::Done,
        Ending::Done(Some(message)) => SessionEnd::Failed(Error::Worker { message, exit_code: 1 }),
        Ending::Left => SessionEnd::Left,
        Ending::Unfit(error) => SessionEnd::Failed(error),
        Ending::Lost => {
            let limit = std::time::Duration::from_secs(1);
            let reason = match runtime.block_on(async { tokio::time::timeout(limit, reader).await }) {
                Ok(Ok(reason)) => reason,
                _ => "this node gave up".to_owned(),
            };
            SessionEnd::Lost(Error::CoordinatorLost { address, reason })
        }
    })
}
