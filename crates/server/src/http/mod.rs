//! The server's HTTP interface: docs/SERVER.md lists the endpoints.

mod admin;
mod completions;
mod error;
mod stream;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use tokio::net::TcpListener;
use tokio::sync::watch;

pub use admin::ModelEntry;
pub use completions::{Completion, CompletionRequest, Prompt, StreamedToken, Usage};
pub use error::ErrorBody;

use crate::fleet::{Fleet, Stopped};
use crate::meters::Meters;

/// The longest body of a request, in bytes: a prompt of 128 Ki tokens as an array of numbers fits.
const BODY_MAX_BYTES: usize = 4 << 20;

/// What the handlers share.
struct App {
    fleet: Fleet,
    meters: Meters,
    /// Names answers.
    requests: AtomicU64,
    /// Whether the server has begun to end.
    ends: watch::Sender<bool>,
}

impl App {
    fn is_ending(&self) -> bool {
        *self.ends.borrow()
    }

    fn next_number(&self) -> u64 {
        self.requests.fetch_add(1, Ordering::Relaxed)
    }
}

/// A server that listens.
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
}

/// Ends a server from elsewhere.
#[derive(Clone)]
pub struct Ender(Arc<App>);

impl Ender {
    /// No new requests from now on; those that run may end.
    pub fn end(&self) {
        self.0.ends.send_replace(true);
    }

    /// Those that run end now.
    pub fn hurry(&self) {
        self.0.fleet.hurry();
    }
}

impl Server {
    /// Listens at `address`; port 0 is any that is free.
    ///
    /// # Errors
    /// The system's: the port is taken, most often.
    pub async fn bind(fleet: Fleet, meters: Meters, address: SocketAddr) -> io::Result<Server> {
        let listener = TcpListener::bind(address).await?;
        let (ends, _) = watch::channel(false);
        let app = App { fleet, meters, requests: AtomicU64::new(1), ends };
        Ok(Server { app: Arc::new(app), listener })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The system's.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Ends it from elsewhere.
    pub fn ender(&self) -> Ender {
        Ender(self.app.clone())
    }

    /// Serves until its [`Ender`] says so; then requests that run have `grace` to end, everything is
    /// given back, and the pool is checked.
    ///
    /// # Errors
    /// The system's.
    pub async fn run(self, grace: Duration) -> io::Result<Stopped> {
        let Server { app, listener } = self;
        let router = Router::new()
            .route("/v1/completions", post(completions::complete))
            .route("/v1/models", get(admin::models))
            .route("/metrics", get(admin::metrics))
            .route("/healthz", get(admin::health))
            .route("/admin/sleep", post(admin::sleep))
            .route("/admin/wake", post(admin::wake))
            .fallback(admin::nothing)
            .method_not_allowed_fallback(admin::otherwise)
            .layer(DefaultBodyLimit::max(BODY_MAX_BYTES))
            .with_state(app.clone());
        let mut ends = app.ends.subscribe();
        let serving = tokio::spawn(async move { axum::serve(listener, router).await });
        // It answers meanwhile: requests that come too late are told so.
        let _ = ends.wait_for(|is_ending| *is_ending).await;
        let ending = app.clone();
        let stopped = tokio::task::spawn_blocking(move || ending.fleet.stop(grace)).await;
        // Answers that are ready go out.
        tokio::time::sleep(LAST_ANSWERS).await;
        serving.abort();
        stopped.map_err(io::Error::other)
    }
}

/// How long the last answers have to leave the process.
const LAST_ANSWERS: Duration = Duration::from_millis(50);
