//! The load program against servers that do not do as they should.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use clap::Parser;
use vmm_server::http::{CompletionRequest, Prompt};
use vmm_server::load::{Client, Ended, LoadError, LoadPlan, run};
use vmm_server::serve::{ServeArgs, start};

fn plan(address: std::net::SocketAddr, timeout: Duration) -> LoadPlan {
    LoadPlan {
        address,
        model: None,
        requests: 100_000,
        concurrency: 8,
        prompt_tokens: 20,
        output_tokens: 20,
        sigma: 0.5,
        seed: 3,
        timeout,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_answer_is_not_waited_for_for_ever() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    let timeout = Duration::from_millis(200);
    let error = run(plan(address, timeout), || {}).await.unwrap_err();
    assert!(matches!(error, LoadError::Silent { .. }), "{error}");
    assert_eq!(error.to_string(), format!("no answer from {address} within 200ms"));
}

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    serve: ServeArgs,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_that_was_made_ends_in_one_of_the_figures() {
    let args = Cli::parse_from(["server", "--driver", "sim", "--port", "0", "--memory", "64MiB"]);
    let (server, _) = start(&args.serve).await.unwrap();
    let (address, ender) = (server.address().unwrap(), server.ender());
    let serving = tokio::spawn(server.run(Duration::ZERO));
    let report = run(plan(address, Duration::from_millis(400)), || {}).await.unwrap();
    assert_eq!(report.asked, report.done + report.refused + report.failed, "{report}");
    ender.end();
    assert_eq!(serving.await.unwrap().unwrap().verdict, Ok(()));
}

/// Answers every request on one connection with no token, the end of the body a while later.
fn answer_slowly(listener: TcpListener) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    let mut bytes = [0; 4096];
    while stream.read(&mut bytes)? > 0 {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                    transfer-encoding: chunked\r\n\r\n";
        stream.write_all(format!("{head}e\r\ndata: [DONE]\n\n\r\n").as_bytes())?;
        thread::sleep(Duration::from_millis(50));
        stream.write_all(b"0\r\n\r\n")?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_is_used_again_however_late_an_answer_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(|| answer_slowly(listener));
    let mut client = Client::connect(address).await.unwrap();
    let prompt = Prompt::Text("x".to_owned());
    let request =
        CompletionRequest { model: "tiny".to_owned(), prompt, max_tokens: 1, stream: true };
    for _ in 0..2 {
        assert_eq!(client.stream(&request, |_| {}).await.unwrap(), Ended::Done);
    }
}
