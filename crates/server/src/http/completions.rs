//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::response::sse::Sse;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::App;
use super::admin::find;
use super::error::Failure;
use super::stream::Events;
use crate::engine::{Job, Outcome, Sink};
use crate::model::{ModelSpec, VOCABULARY, text_of, tokens_of};

/// What is asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionRequest {
    /// Of which model.
    pub model: String,
    /// What is to be continued.
    pub prompt: Prompt,
    /// By how many tokens.
    #[serde(default = "default_max_tokens")]
    pub max_tokens: u32,
    /// Whether tokens are sent one by one, as server-sent events.
    #[serde(default)]
    pub stream: bool,
}

fn default_max_tokens() -> u32 {
    16
}

/// A prompt.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a text, or an array of tokens below 256")]
pub enum Prompt {
    /// Its bytes are the tokens.
    Text(String),
    /// Tokens, each below 256.
    Tokens(Vec<u32>),
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completion {
    /// Tells answers apart.
    pub id: String,
    /// Always `text_completion`.
    pub object: String,
    /// Of which model.
    pub model: String,
    /// One.
    pub choices: Vec<Choice>,
    /// How many tokens.
    pub usage: Usage,
}

/// What was answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Always 0.
    pub index: u32,
    /// As text: one printable character a token.
    pub text: String,
    /// The tokens themselves.
    pub tokens: Vec<u32>,
    /// Always `length`: no token ends an answer.
    pub finish_reason: String,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Asked with.
    pub prompt_tokens: u64,
    /// Answered.
    pub completion_tokens: u64,
    /// Both.
    pub total_tokens: u64,
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamedToken {
    /// The answer's.
    pub id: String,
    /// The token as text.
    pub text: String,
    /// The token.
    pub token: u32,
}

/// What an engine says of a request.
#[derive(Debug)]
pub(super) enum Event {
    Token(u32),
    Done(Outcome),
}

/// Sends what the engine says to the request's handler; once that is gone nobody listens. What waits
/// there is at most the answer.
struct Channel(UnboundedSender<Event>);

impl Sink for Channel {
    fn token(&mut self, id: u32) {
        let _ = self.0.send(Event::Token(id));
    }

    fn done(&mut self, outcome: Outcome) {
        let _ = self.0.send(Event::Done(outcome));
    }

    fn is_gone(&self) -> bool {
        self.0.is_closed()
    }
}

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    request: Result<Json<CompletionRequest>, JsonRejection>,
) -> Result<Response, Failure> {
    let Json(request) = request.map_err(Failure::bad_body)?;
    if app.is_ending() {
        return Err(Failure::stopping());
    }
    let model = find(&app, &request.model)?;
    let prompt = prompt_of(&request, model.spec())?;
    let (sender, mut events) = unbounded_channel();
    let prompt_tokens = prompt.len() as u64;
    let sink = Box::new(Channel(sender));
    model.submit(Job { prompt, max_tokens: request.max_tokens, sink });
    // A refusal has a status of its own, so nothing is said before the first event.
    let first = events.recv().await;
    let id = format!("cmpl-{}", app.next_number());
    let first = match first {
        Some(Event::Token(token)) => token,
        Some(Event::Done(outcome)) => return Err(failure(outcome)),
        None => return Err(Failure::stopping()),
    };
    if request.stream {
        return Ok(Sse::new(Events::new(id, first, events)).into_response());
    }
    let tokens = collect(first, events).await?;
    let completion_tokens = tokens.len() as u64;
    let usage =
        Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens };
    let text = tokens.iter().copied().map(text_of).collect();
    let finish_reason = "length".to_owned();
    let choices = vec![Choice { index: 0, text, tokens, finish_reason }];
    let object = "text_completion".to_owned();
    Ok(Json(Completion { id, object, model: request.model, choices, usage }).into_response())
}

async fn collect(first: u32, mut events: UnboundedReceiver<Event>) -> Result<Vec<u32>, Failure> {
    let mut tokens = vec![first];
    loop {
        match events.recv().await {
            Some(Event::Token(token)) => tokens.push(token),
            Some(Event::Done(Outcome::Finished)) => return Ok(tokens),
            Some(Event::Done(outcome)) => return Err(failure(outcome)),
            None => return Err(Failure::stopping()),
        }
    }
}

fn failure(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Refused(refusal) => Failure::refused(refusal),
        Outcome::Failed(reason) => Failure::internal(reason),
        Outcome::Finished | Outcome::Cancelled => Failure::internal("the request has no answer"),
    }
}

/// The tokens of the prompt, if the model can take them.
fn prompt_of(request: &CompletionRequest, spec: &ModelSpec) -> Result<Vec<u32>, Failure> {
    let prompt = match &request.prompt {
        Prompt::Text(text) => tokens_of(text),
        Prompt::Tokens(tokens) => tokens.clone(),
    };
    if prompt.is_empty() {
        return Err(Failure::bad_request("an empty prompt: expected at least one token"));
    }
    if request.max_tokens == 0 {
        return Err(Failure::bad_request("max_tokens = 0: expected at least 1"));
    }
    if let Some(token) = prompt.iter().find(|token| **token >= VOCABULARY) {
        let error = format!("token {token}: expected tokens below {VOCABULARY}");
        return Err(Failure::bad_request(error));
    }
    let total = (prompt.len() as u64).saturating_add(u64::from(request.max_tokens));
    if total > u64::from(spec.max_tokens) {
        return Err(Failure::bad_request(format!(
            "a prompt of {} tokens and {} more are {total}: expected at most {} for model {}",
            prompt.len(),
            request.max_tokens,
            spec.max_tokens,
            spec.name
        )));
    }
    Ok(prompt)
}
