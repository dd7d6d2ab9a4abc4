//! What is not inference: models, figures, health, sleep.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::App;
use super::error::Failure;
use crate::engine::{EngineError, EngineFigures};
use crate::fleet::Model;
use crate::model::ModelSpec;

/// One of the models, as `/v1/models` lists them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// Its name.
    pub id: String,
    /// Always `model`.
    pub object: String,
    /// What it is.
    pub spec: ModelSpec,
    /// Its figures.
    pub figures: EngineFigures,
}

#[derive(Serialize)]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ModelEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    model: String,
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Json<ModelList> {
    let entry = |model: &Arc<Model>| ModelEntry {
        id: model.spec().name.clone(),
        object: "model".to_owned(),
        spec: model.spec().clone(),
        figures: model.figures(),
    };
    Json(ModelList { object: "list", data: app.fleet.models().iter().map(entry).collect() })
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let text = app.meters.render(app.fleet.pool());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text)
}

pub(super) async fn health(State(app): State<Arc<App>>) -> Result<&'static str, Failure> {
    if app.is_ending() { Err(Failure::stopping()) } else { Ok("ok\n") }
}

pub(super) async fn sleep(
    State(app): State<Arc<App>>,
    named: Result<Json<Named>, JsonRejection>,
) -> Result<Json<ModelEntry>, Failure> {
    change(&app, named, |model, answer| {
        model.sleep(move |done| {
            // Who asked may be gone.
            let _ = answer.send(done);
        });
    })
    .await
}

pub(super) async fn wake(
    State(app): State<Arc<App>>,
    named: Result<Json<Named>, JsonRejection>,
) -> Result<Json<ModelEntry>, Failure> {
    change(&app, named, |model, answer| {
        model.wake(move |done| {
            let _ = answer.send(done);
        });
    })
    .await
}

async fn change(
    app: &App,
    named: Result<Json<Named>, JsonRejection>,
    ask: impl FnOnce(&Model, oneshot::Sender<Result<(), EngineError>>),
) -> Result<Json<ModelEntry>, Failure> {
    let Json(named) = named.map_err(Failure::bad_body)?;
    let model = find(app, &named.model)?;
    let (sender, receiver) = oneshot::channel();
    ask(model, sender);
    match receiver.await {
        Ok(Ok(())) => Ok(Json(ModelEntry {
            id: model.spec().name.clone(),
            object: "model".to_owned(),
            spec: model.spec().clone(),
            figures: model.figures(),
        })),
        Ok(Err(error @ EngineError::Busy { .. })) => {
            Err(Failure::new(StatusCode::CONFLICT, error.to_string()))
        }
        Ok(Err(error)) if error.is_shortage() => Err(Failure::short(error.to_string())),
        Ok(Err(error)) => Err(Failure::internal(error.to_string())),
        Err(_) => Err(Failure::stopping()),
    }
}

pub(super) async fn nothing(uri: Uri) -> Failure {
    Failure::unknown_path(uri.path())
}

pub(super) async fn otherwise(method: Method, uri: Uri) -> Failure {
    Failure::other_method(&method, uri.path())
}

pub(super) fn find<'a>(app: &'a App, name: &str) -> Result<&'a Arc<Model>, Failure> {
    let known = app.fleet.models().iter().map(|model| model.spec().name.as_str());
    app.fleet.model(name).ok_or_else(|| Failure::unknown_model(name, known))
}
