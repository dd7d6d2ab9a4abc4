//! [`Events`]: an answer as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::response::sse::Event as Sent;
use futures_core::Stream;
use tokio::sync::mpsc::UnboundedReceiver;

use super::completions::{Event, StreamedToken};
use super::error::{ErrorBody, body_of};
use crate::engine::Outcome;
use crate::model::text_of;

/// One event a token, then `[DONE]`; or an error, which is the last then.
pub(super) struct Events {
    id: String,
    first: Option<u32>,
    events: UnboundedReceiver<Event>,
    is_done: bool,
}

impl Events {
    pub(super) fn new(id: String, first: u32, events: UnboundedReceiver<Event>) -> Events {
        Events { id, first: Some(first), events, is_done: false }
    }

    fn token(&self, token: u32) -> Sent {
        let text = text_of(token).to_string();
        json(&StreamedToken { id: self.id.clone(), text, token })
    }

    fn end(&mut self, outcome: Option<Outcome>) -> Sent {
        self.is_done = true;
        let plain = |error: String| json(&ErrorBody { error, refusal: None });
        match outcome {
            Some(Outcome::Finished) => Sent::default().data("[DONE]"),
            Some(Outcome::Refused(refusal)) => json(&body_of(refusal)),
            Some(Outcome::Failed(reason)) => plain(reason),
            Some(Outcome::Cancelled) | None => plain("the server ends".to_owned()),
        }
    }
}

impl Stream for Events {
    type Item = Result<Sent, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.is_done {
            return Poll::Ready(None);
        }
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(self.token(first))));
        }
        let sent = match self.events.poll_recv(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(Event::Token(token))) => self.token(token),
            Poll::Ready(Some(Event::Done(outcome))) => self.end(Some(outcome)),
            Poll::Ready(None) => self.end(None),
        };
        Poll::Ready(Some(Ok(sent)))
    }
}

/// Plain structures of numbers and text always have a JSON form.
fn json(value: &impl serde::Serialize) -> Sent {
    Sent::default().data(serde_json::to_string(value).unwrap_or_default())
}
