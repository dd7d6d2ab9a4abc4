//! The server over its HTTP interface, on the simulated device: 127.0.0.1, any free port.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use vmm_server::cache::Form;
use vmm_server::engine::RefusalKind;
use vmm_server::fleet::Stopped;
use vmm_server::http::{Completion, CompletionRequest, Ender, ErrorBody, ModelEntry, Prompt};
use vmm_server::load::{self, Client, Ended, LoadPlan};
use vmm_server::model::{ModelSpec, VOCABULARY, text_of, tokens_of};
use vmm_server::serve::{ServeArgs, start};

const LONG: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    serve: ServeArgs,
}

struct Running {
    address: SocketAddr,
    ender: Ender,
    serving: JoinHandle<std::io::Result<Stopped>>,
}

impl Running {
    /// With `more` settings.
    async fn start(more: &[&str]) -> Running {
        let fixed = ["server", "--driver", "sim", "--port", "0", "--memory", "128MiB"];
        let args = Cli::parse_from(fixed.iter().chain(more)).serve;
        let (server, why) = start(&args).await.unwrap();
        assert!(why.contains("sim"), "{why}");
        let (address, ender) = (server.address().unwrap(), server.ender());
        let serving = tokio::spawn(server.run(LONG));
        Running { address, ender, serving }
    }

    async fn client(&self) -> Client {
        Client::connect(self.address).await.unwrap()
    }

    async fn metric(&self, line: &str) -> f64 {
        let (_, text) = self.client().await.text(Method::GET, "/metrics", "").await.unwrap();
        let found = text.lines().find_map(|it| it.strip_prefix(line));
        found.unwrap_or_else(|| panic!("{line} in {text}")).trim().parse().unwrap()
    }

    async fn figures(&self) -> Vec<ModelEntry> {
        self.client().await.models().await.unwrap()
    }

    /// Ends it: everything was given back.
    async fn end(self) -> Stopped {
        self.ender.end();
        let stopped = self.serving.await.unwrap().unwrap();
        assert_eq!(stopped.verdict, Ok(()));
        stopped
    }
}

fn asking(prompt: Prompt, max_tokens: u32, stream: bool) -> CompletionRequest {
    CompletionRequest { model: "tiny".to_owned(), prompt, max_tokens, stream }
}

fn right(prompt: &[u32], count: usize) -> Vec<u32> {
    let pattern = ModelSpec::preset("tiny").unwrap().pattern().unwrap();
    pattern.answer(prompt, count, VOCABULARY)
}

async fn until(mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..3000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it never came true");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_is_answered_at_once_or_token_by_token() {
    let server = Running::start(&["--pace", "fast"]).await;
    let mut client = server.client().await;
    let request = asking(Prompt::Text("hello".to_owned()), 12, false);
    let body = serde_json::to_string(&request).unwrap();
    let (status, text) = client.text(Method::POST, "/v1/completions", body).await.unwrap();
    assert_eq!(status, StatusCode::OK, "{text}");
    let answer: Completion = serde_json::from_str(&text).unwrap();
    let expected = right(&tokens_of("hello"), 12);
    assert_eq!(answer.choices[0].tokens, expected);
    assert_eq!(answer.choices[0].text, expected.iter().map(|it| text_of(*it)).collect::<String>());
    let usage = answer.usage;
    let counted = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens);
    assert_eq!(counted, (5, 12, 17));

    let mut tokens = Vec::new();
    let request = asking(Prompt::Tokens(tokens_of("hello")), 12, true);
    let ended = client.stream(&request, |token| tokens.push(token)).await.unwrap();
    assert_eq!((ended, tokens), (Ended::Done, expected));

    let models = server.figures().await;
    assert_eq!(models[0].spec, ModelSpec::preset("tiny").unwrap());
    let (status, text) = client.text(Method::GET, "/healthz", "").await.unwrap();
    assert_eq!((status, text.as_str()), (StatusCode::OK, "ok\n"));
    until(async || {
        server.metric("vmm_requests_total{model=\"tiny\",outcome=\"finished\"}").await == 2.0
    })
    .await;
    assert_eq!(server.metric("vmm_kv_mismatches_total{model=\"tiny\"}").await, 0.0);
    assert_eq!(server.metric("vmm_tokens_total{model=\"tiny\",kind=\"answer\"}").await, 24.0);
    assert!(server.metric("vmm_step_us_count{model=\"tiny\"}").await >= 24.0);
    assert!(server.metric("vmm_room_tokens{model=\"tiny\",kind=\"here\"}").await > 1000.0);
    let held = server.metric("vmm_pool_bytes{device=\"0\",kind=\"held\"}").await;
    assert!((4e6..128e6).contains(&held), "{held}");
    let stopped = server.end().await;
    assert_eq!(stopped.counts[0].1.finished, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_said_with_what_was_expected() {
    let server = Running::start(&["--pace", "fast"]).await;
    let mut client = server.client().await;
    let ok = json!({"model": "tiny", "prompt": "x", "max_tokens": 1});
    let with = |key: &str, value: Value| {
        let mut body = ok.clone();
        body[key] = value;
        body
    };
    let cases = [
        (with("model", json!("gpt")), 404, "no model \"gpt\": expected one of tiny"),
        (with("max_tokens", json!(16384)), 400, "expected at most 16384"),
        (with("max_tokens", json!(0)), 400, "expected at least 1"),
        (with("prompt", json!("")), 400, "expected at least one token"),
        (with("prompt", json!([1, 256])), 400, "token 256: expected tokens below 256"),
        (with("prompt", json!({"a": 1})), 400, "expected a text, or an array of tokens"),
        (with("prompt", json!([1, -1])), 400, "expected a text, or an array of tokens"),
        (with("temperature", json!(1)), 400, "temperature"),
    ];
    for (body, status, says) in cases {
        let sent = client.text(Method::POST, "/v1/completions", body.to_string());
        let (found, text) = sent.await.unwrap();
        let body: ErrorBody = serde_json::from_str(&text).unwrap();
        assert_eq!(found.as_u16(), status, "{text}");
        assert!(body.error.contains(says), "{says} in {text}");
    }
    let (status, _) = client.text(Method::POST, "/v1/completions", "{").await.unwrap();
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let body = with("prompt", json!("x".repeat(4 << 20))).to_string();
    let (status, text) = client.text(Method::POST, "/v1/completions", body).await.unwrap();
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(text.contains("expected at most 4194304 bytes"), "{text}");
    // It was not read to its end.
    let mut client = server.client().await;
    let (status, text) = client.text(Method::GET, "/nothing", "").await.unwrap();
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(text.contains("nothing at /nothing"), "{text}");
    let (status, text) = client.text(Method::GET, "/v1/completions", "").await.unwrap();
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    assert!(text.contains("GET /v1/completions: expected the method"), "{text}");
    let body = r#"{"model": "gpt"}"#;
    let (status, _) = client.text(Method::POST, "/admin/sleep", body).await.unwrap();
    assert_eq!(status, StatusCode::NOT_FOUND);
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overload_is_refused_with_numbers_and_the_rest_is_answered() {
    let server = Running::start(&["--max-running", "2", "--max-waiting", "2"]).await;
    let asks = (0..12u32).map(|index| {
        let address = server.address;
        tokio::spawn(async move {
            let prompt = vec![index; 20];
            let mut tokens = Vec::new();
            let mut client = Client::connect(address).await.unwrap();
            let request = asking(Prompt::Tokens(prompt.clone()), 60, true);
            let ended = client.stream(&request, |token| tokens.push(token)).await.unwrap();
            (ended, tokens == right(&prompt, 60))
        })
    });
    let (mut done, mut refused) = (0, 0);
    for ask in asks.collect::<Vec<_>>() {
        match ask.await.unwrap() {
            (Ended::Done, is_right) => {
                assert!(is_right);
                done += 1;
            }
            (Ended::Refused(status, body), _) => {
                assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
                let refusal = body.refusal.unwrap();
                assert_eq!(refusal.kind, RefusalKind::QueueFull);
                assert!(refusal.waiting >= 2 && refusal.needed_tokens == 20, "{refusal:?}");
                assert!(refusal.room.here_tokens > 0);
                refused += 1;
            }
            (Ended::Failed(why), _) => panic!("{why}"),
        }
    }
    assert!(done >= 4 && refused >= 1 && done + refused == 12, "{done} {refused}");
    let stopped = server.end().await;
    let counts = stopped.counts[0].1;
    assert_eq!((counts.finished, counts.refused), (done, refused));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_frees_its_sequence() {
    let server = Running::start(&[]).await;
    let mut client = server.client().await;
    let request = asking(Prompt::Text("long".to_owned()), 16000, true);
    let body = serde_json::to_string(&request).unwrap();
    let response = client.send(Method::POST, "/v1/completions", body).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    until(async || server.figures().await[0].figures.running == 1).await;
    drop((response, client));
    until(async || server.figures().await[0].figures.counts.cancelled == 1).await;
    let figures = server.figures().await[0].figures;
    assert_eq!((figures.running, figures.cache.sequences), (0, 0));
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_ends_finishes_what_runs_and_takes_nothing_new() {
    let server = Running::start(&[]).await;
    let address = server.address;
    let runs = tokio::spawn(async move {
        let mut client = Client::connect(address).await.unwrap();
        let mut tokens = Vec::new();
        let request = asking(Prompt::Text("run".to_owned()), 400, true);
        let ended = client.stream(&request, |token| tokens.push(token)).await.unwrap();
        (ended, tokens)
    });
    until(async || server.figures().await[0].figures.running == 1).await;
    let mut late = server.client().await;
    server.ender.end();
    let request = asking(Prompt::Text("late".to_owned()), 1, true);
    let refused = late.stream(&request, |_| {}).await.unwrap();
    assert!(matches!(refused, Ended::Refused(StatusCode::SERVICE_UNAVAILABLE, _)), "{refused:?}");
    assert_eq!(runs.await.unwrap(), (Ended::Done, right(&tokens_of("run"), 400)));
    let stopped = server.end().await;
    assert_eq!(stopped.counts[0].1.finished, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_share_memory_that_holds_one() {
    let more = ["--model", "a=tiny", "--model", "b=tiny", "--memory", "9MiB", "--pace", "fast"];
    let args: Vec<&str> = more.iter().copied().chain(["--patience-ms", "30000"]).collect();
    let server = {
        let args =
            Cli::parse_from(["server", "--driver", "sim", "--port", "0"].iter().chain(&args));
        let (server, _) = start(&args.serve).await.unwrap();
        let (address, ender) = (server.address().unwrap(), server.ender());
        Running { address, ender, serving: tokio::spawn(server.run(LONG)) }
    };
    let mut client = server.client().await;
    for model in ["a", "b", "a", "b"] {
        let mut tokens = Vec::new();
        let prompt = Prompt::Text("share".to_owned());
        let request =
            CompletionRequest { model: model.to_owned(), prompt, max_tokens: 8, stream: true };
        let ended = client.stream(&request, |token| tokens.push(token)).await.unwrap();
        assert_eq!((ended, tokens), (Ended::Done, right(&tokens_of("share"), 8)));
    }
    until(async || server.figures().await.iter().filter(|it| it.figures.is_asleep).count() == 1)
        .await;
    // By hand: b is awake, sleeps, and a wakes for nobody's request.
    let admin = async |client: &mut Client, path: &str, model: &str| {
        let body = json!({ "model": model }).to_string();
        client.text(Method::POST, path, body).await.unwrap()
    };
    let (status, text) = admin(&mut client, "/admin/sleep", "b").await;
    assert_eq!(status, StatusCode::OK, "{text}");
    let (status, text) = admin(&mut client, "/admin/wake", "a").await;
    assert_eq!(status, StatusCode::OK, "{text}");
    let entry: ModelEntry = serde_json::from_str(&text).unwrap();
    assert!(!entry.figures.is_asleep && entry.figures.counts.wakes >= 3, "{entry:?}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_finds_every_answer_right_on_every_form() {
    use clap::ValueEnum;
    for form in Form::value_variants() {
        let name = form.to_possible_value().unwrap();
        let form = ["--form", name.get_name(), "--pace", "fast", "--lend", "64MiB"];
        let server = Running::start(&form).await;
        let plan = LoadPlan {
            address: server.address,
            model: None,
            requests: 60,
            concurrency: 16,
            prompt_tokens: 60,
            output_tokens: 20,
            sigma: 0.8,
            seed: 7,
            timeout: LONG,
        };
        let report = load::run(plan, || {}).await.unwrap();
        assert!(report.is_good(), "{report}");
        assert_eq!((report.done, report.refused, report.wrong), (60, 0, 0), "{report}");
        let stopped = server.end().await;
        assert_eq!(stopped.counts[0].1.answered_tokens, report.tokens);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wake_without_room_says_when_to_come_again() {
    let more = ["--memory", "6MiB", "--model", "a=tiny", "--model", "b=tiny"];
    let args = Cli::parse_from(["server", "--driver", "sim", "--port", "0"].iter().chain(&more));
    let (server, _) = start(&args.serve).await.unwrap();
    let (address, ender) = (server.address().unwrap(), server.ender());
    let server = Running { address, ender, serving: tokio::spawn(server.run(LONG)) };
    let mut client = server.client().await;
    let body = r#"{"model": "b"}"#;
    let refused = client.send(Method::POST, "/admin/wake", body).await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.headers()["retry-after"], "1");
    server.end().await;
}
