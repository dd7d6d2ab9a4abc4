//! Answers that say what is wrong, and what would be right.

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::BODY_MAX_BYTES;
use crate::engine::{Refusal, RefusalKind};

/// The body of an answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What is wrong, and what was expected.
    pub error: String,
    /// With the numbers, if memory or patience was short.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub refusal: Option<Refusal>,
}

/// An answer that is not a success.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    status: StatusCode,
    body: Box<ErrorBody>,
    retry_after_s: Option<u32>,
}

/// After how many seconds a refused request may come again.
const RETRY_AFTER_S: u32 = 1;

impl Failure {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Failure {
        let body = Box::new(ErrorBody { error: error.into(), refusal: None });
        Failure { status, body, retry_after_s: None }
    }

    /// The request itself is wrong.
    pub(super) fn bad_request(error: impl Into<String>) -> Failure {
        Failure::new(StatusCode::BAD_REQUEST, error)
    }

    /// There is no such model.
    pub(super) fn unknown_model<'a>(model: &str, known: impl Iterator<Item = &'a str>) -> Failure {
        let known: Vec<&str> = known.collect();
        let error = format!("no model {model:?}: expected one of {}", known.join(", "));
        Failure::new(StatusCode::NOT_FOUND, error)
    }

    /// The server ends.
    pub(super) fn stopping() -> Failure {
        Failure::new(StatusCode::SERVICE_UNAVAILABLE, "the server ends")
    }

    /// The body of a request is not what it should be.
    pub(super) fn bad_body(rejection: JsonRejection) -> Failure {
        match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => Failure::bad_request(format!(
                "the body is too long: expected at most {BODY_MAX_BYTES} bytes"
            )),
            _ => Failure::bad_request(rejection.body_text()),
        }
    }

    /// There is no such endpoint.
    pub(super) fn unknown_path(path: &str) -> Failure {
        let expected = "expected one of those that docs/SERVER.md lists";
        Failure::new(StatusCode::NOT_FOUND, format!("nothing at {path}: {expected}"))
    }

    /// The endpoint takes another method.
    pub(super) fn other_method(method: &Method, path: &str) -> Failure {
        let expected = "expected the method that docs/SERVER.md lists for it";
        Failure::new(StatusCode::METHOD_NOT_ALLOWED, format!("{method} {path}: {expected}"))
    }

    /// Memory for a model is short.
    pub(super) fn short(error: impl Into<String>) -> Failure {
        let failure = Failure::new(StatusCode::TOO_MANY_REQUESTS, error);
        Failure { retry_after_s: Some(RETRY_AFTER_S), ..failure }
    }

    /// There was no room.
    pub(super) fn refused(refusal: Refusal) -> Failure {
        if refusal.kind == RefusalKind::Stopping {
            return Failure { body: Box::new(body_of(refusal)), ..Failure::stopping() };
        }
        Failure {
            status: StatusCode::TOO_MANY_REQUESTS,
            body: Box::new(body_of(refusal)),
            retry_after_s: Some(RETRY_AFTER_S),
        }
    }

    /// Something is wrong with the server.
    pub(super) fn internal(error: impl Into<String>) -> Failure {
        Failure::new(StatusCode::INTERNAL_SERVER_ERROR, error)
    }
}

pub(super) fn body_of(refusal: Refusal) -> ErrorBody {
    ErrorBody { error: refusal.reason.clone(), refusal: Some(refusal) }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(*self.body)).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}
