//! [`Client`]: one connection to a server, as much of HTTP as the load program needs.

use std::net::SocketAddr;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;

use crate::http::{CompletionRequest, ErrorBody, ModelEntry, StreamedToken};

/// A connection.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    address: SocketAddr,
}

/// The server cannot be reached, or does not speak as expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No connection.
    #[error(
        "cannot connect to {address}: {cause}; expected a vmm-server that listens there (--url)"
    )]
    Connect {
        /// Where.
        address: SocketAddr,
        /// Why.
        cause: std::io::Error,
    },
    /// The connection broke.
    #[error("the connection to the server: {0}")]
    Http(#[from] hyper::Error),
    /// The request cannot be formed.
    #[error("the request: {0}")]
    Request(#[from] hyper::http::Error),
    /// The answer is no JSON of the kind expected.
    #[error("the server answered {text:?}: {cause}")]
    Json {
        /// What it said.
        text: String,
        /// What is wrong with it.
        cause: serde_json::Error,
    },
    /// Another status than success.
    #[error("the server answered {status}: {text}")]
    Status {
        /// The status.
        status: StatusCode,
        /// The body.
        text: String,
    },
}

/// How a streamed answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All tokens came.
    Done,
    /// The server had no room, or ended.
    Refused(StatusCode, ErrorBody),
    /// Something is wrong with the server, or the request.
    Failed(String),
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelEntry>,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// [`ClientError::Connect`], [`ClientError::Http`].
    pub async fn connect(address: SocketAddr) -> Result<Client, ClientError> {
        let stream = TcpStream::connect(address).await;
        let stream = stream.map_err(|cause| ClientError::Connect { address, cause })?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the sender; what breaks it is an error of the next request.
        tokio::spawn(connection);
        Ok(Client { sender, address })
    }

    /// Sends a request, and waits for the head of the answer.
    ///
    /// # Errors
    /// [`ClientError::Http`], [`ClientError::Request`].
    pub async fn send(
        &mut self,
        method: Method,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Result<Response<Incoming>, ClientError> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.address.to_string())
            .header("content-type", "application/json")
            .body(Full::new(body.into()))?;
        self.sender.ready().await?;
        Ok(self.sender.send_request(request).await?)
    }

    /// The same, with the whole answer.
    ///
    /// # Errors
    /// [`ClientError::Http`], [`ClientError::Request`].
    pub async fn text(
        &mut self,
        method: Method,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Result<(StatusCode, String), ClientError> {
        let response = self.send(method, path, body).await?;
        let status = response.status();
        Ok((status, whole(response).await?))
    }

    /// The server's models.
    ///
    /// # Errors
    /// As [`Client::text`]; [`ClientError::Status`], [`ClientError::Json`].
    pub async fn models(&mut self) -> Result<Vec<ModelEntry>, ClientError> {
        let (status, text) = self.text(Method::GET, "/v1/models", "").await?;
        if !status.is_success() {
            return Err(ClientError::Status { status, text });
        }
        let list: Result<ModelList, _> = serde_json::from_str(&text);
        Ok(list.map_err(|cause| ClientError::Json { text, cause })?.data)
    }

    /// Asks for an answer token by token; `on_token` is called with each.
    ///
    /// # Errors
    /// As [`Client::text`]; [`ClientError::Json`].
    pub async fn stream(
        &mut self,
        request: &CompletionRequest,
        mut on_token: impl FnMut(u32),
    ) -> Result<Ended, ClientError> {
        let parse = |text: &str, cause| ClientError::Json { text: text.to_owned(), cause };
        let body = serde_json::to_string(request).map_err(|cause| parse("", cause))?;
        let mut response = self.send(Method::POST, "/v1/completions", body).await?;
        let status = response.status();
        if !status.is_success() {
            let text = whole(response).await?;
            let is_refusal =
                matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
            return match serde_json::from_str(&text) {
                Ok(body) if is_refusal => Ok(Ended::Refused(status, body)),
                _ => Ok(Ended::Failed(format!("{status}: {text}"))),
            };
        }
        let (mut lines, mut ended) = (Lines::default(), None);
        // Read to its end, for what is left unread closes the connection.
        while let Some(frame) = response.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            lines.pending.extend_from_slice(&data);
            while let Some(line) = lines.next() {
                let Some(data) = line.strip_prefix("data: ") else { continue };
                if data == "[DONE]" {
                    ended = Some(Ended::Done);
                } else if let Ok(token) = serde_json::from_str::<StreamedToken>(data) {
                    on_token(token.token);
                } else {
                    let body: Result<ErrorBody, _> = serde_json::from_str(data);
                    let body = body.map_err(|it| parse(data, it))?;
                    ended = Some(match &body.refusal {
                        Some(_) => Ended::Refused(status, body),
                        None => Ended::Failed(body.error),
                    });
                }
            }
        }
        Ok(ended.unwrap_or_else(|| Ended::Failed("the answer broke off".to_owned())))
    }
}

async fn whole(response: Response<Incoming>) -> Result<String, ClientError> {
    let bytes = response.into_body().collect().await?.to_bytes();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Lines of a body that comes in pieces.
#[derive(Debug, Default)]
struct Lines {
    pending: Vec<u8>,
}

impl Lines {
    fn next(&mut self) -> Option<String> {
        let end = self.pending.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.pending.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_whole_however_they_are_cut() {
        let mut lines = Lines::default();
        lines.pending.extend_from_slice(b"data: 1\r\n\nda");
        assert_eq!(lines.next().as_deref(), Some("data: 1"));
        assert_eq!(lines.next().as_deref(), Some(""));
        assert_eq!(lines.next(), None);
        lines.pending.extend_from_slice(b"ta: 2\n");
        assert_eq!(lines.next().as_deref(), Some("data: 2"));
    }
}
