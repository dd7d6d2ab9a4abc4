//! Programs of the pool whose panics abort: errors are values as ever, a panic ends the process with its
//! message, and whoever shares memory with it goes on.
//!
//! ```text
//! tests/aborts.sh      builds this with `-C panic=abort`, and runs it
//! ```
//!
//! Without arguments it starts itself in each role, and looks at how that ends.
#![allow(clippy::unwrap_used, reason = "a check that fails ends the program")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{ChunkSize, Move, Pool, PoolBuilder};
use vmm_share::{
    Access, Address, Exporter, ImportState, Importer, ImporterOptions, NamedBuffer, Offered, Owner,
    OwnerClient,
};
use vmm_sys::object::{Stream, retry_failed_drops};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, DeviceId, Driver, ResultCode};

const G: u64 = 2 << 20;
const HOME: DeviceId = DeviceId(0);
const SOON: Duration = Duration::from_secs(20);
/// What each panic here says: as the simulated device does.
const MEANT: &str = "injected panic in";

fn machine() -> (Arc<Sim>, Arc<dyn Driver>) {
    let sim = Sim::builder().devices(2).build();
    (sim.clone(), sim)
}

fn pool(driver: &Arc<dyn Driver>, settings: fn(PoolBuilder) -> PoolBuilder) -> Pool {
    let builder = Pool::builder(driver.clone()).device(HOME).device(DeviceId(1));
    settings(builder.chunk(ChunkSize::Fixed(G)).background(false)).build().unwrap()
}

/// A block, and an elastic buffer that grows and moves.
fn work(driver: &Arc<dyn Driver>) -> Result<(), Box<dyn std::error::Error>> {
    let builder = Pool::builder(driver.clone()).device(HOME).device(DeviceId(1));
    let pool = builder.chunk(ChunkSize::Fixed(G)).background(false).build()?;
    let stream = Stream::create(driver, HOME)?;
    let block = pool.lane(&stream)?.alloc(3 * G)?;
    let buffer = pool.elastic(HOME).capacity_bytes(8 * G).chunk_bytes(G).build()?;
    buffer.grow_to(4 * G)?;
    drop(buffer.use_on(&stream)?);
    buffer.migrate(Move::to(DeviceId(1)))?;
    drop(block);
    Ok(())
}

/// Every driver call fails once: an error that names it, or nothing to see.
fn errors_are_values() {
    let (sim, driver) = machine();
    let mut refused = 0;
    for k in 1.. {
        sim.inject(FaultPlan::fail(ResultCode::NOT_PERMITTED).at(k).once());
        let outcome = work(&driver);
        let hit = sim.faults_hit();
        sim.clear_faults();
        if let Err(error) = outcome {
            assert!(error.to_string().contains(hit[0].name()), "{error}");
            refused += 1;
        }
        assert_eq!(retry_failed_drops(&driver), 0);
        sim.check_clean().unwrap();
        if hit.is_empty() {
            println!("of {} driver calls {refused} failed with an error", k - 1);
            assert!(refused > 50);
            return;
        }
    }
}

/// A callback of the program panics.
fn callback_panics() {
    let (_, driver) = machine();
    let pool = pool(&driver, |it| it.limit_bytes(4 * G));
    let _hook = pool.on_shortage(|_, _| panic!("{MEANT} a callback"));
    let stream = Stream::create(&driver, HOME).unwrap();
    let _block = pool.lane(&stream).unwrap().alloc(8 * G);
}

/// A driver call panics in the thread that makes it.
fn driver_panics(sim: &Arc<Sim>, driver: &Arc<dyn Driver>) {
    sim.inject(FaultPlan::panic().on(Call::MemCreate));
    let stream = Stream::create(driver, HOME).unwrap();
    let _block = pool(driver, |it| it).lane(&stream).unwrap().alloc(8 * G);
}

/// One panics in the pool's own thread.
fn background_panics() {
    let (sim, driver) = machine();
    let pool = pool(&driver, |it| it.background(true).stock_marks(4 * G, 8 * G));
    sim.inject(FaultPlan::panic().on(Call::MemCreate));
    // The stock is filled again after this.
    let stream = Stream::create(&driver, HOME).unwrap();
    let _block = pool.lane(&stream).unwrap().alloc(2 * G);
    std::thread::sleep(SOON);
}

/// Offers a buffer until a line comes, and panics then.
fn owner_panics(address: &Address) {
    let (sim, driver) = machine();
    let pool = pool(&driver, |it| it);
    let builder = pool.elastic(HOME).capacity_bytes(4 * G).chunk_bytes(G).exportable(true);
    let buffer = Arc::new(builder.build().unwrap());
    buffer.grow_to(2 * G).unwrap();
    buffer.write(0, &[5]).unwrap();
    let exporter = Exporter::builder().timeout(SOON).bind(address.clone()).unwrap();
    let _offer = exporter.offer("buffer", &buffer, Offered::ReadWrite).unwrap();
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    driver_panics(&sim, &driver);
}

/// Writes to a buffer of the owner, and panics.
fn worker_panics(address: &Address) {
    let (sim, driver) = machine();
    let options = ImporterOptions::new(driver.clone()).timeout(SOON);
    let client = OwnerClient::connect(address, options).unwrap();
    let (import, _) = client.create_or_find(&wanted()).unwrap();
    import.write(0, &[7]).unwrap();
    driver_panics(&sim, &driver);
}

fn wanted() -> NamedBuffer {
    NamedBuffer::new("kv", 2 * G).chunk_bytes(G).others_write(true)
}

/// This program in a role.
fn start(role: &str, address: &Address) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([role, &address.to_string()]).env("RUST_BACKTRACE", "0");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// It was aborted, and has said why.
fn check_aborted(role: &str, child: Child) {
    let output = child.wait_with_output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(words.contains(MEANT), "{role}: {words}");
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{role}: {}", output.status);
    println!("{role}: aborted, with its message");
}

fn a_worker_that_aborts_leaves_the_owner(address: &Address) {
    let (_, driver) = machine();
    let owner = Owner::builder(driver.clone()).timeout(SOON).bind(address.clone()).unwrap();
    let connect =
        || OwnerClient::connect(address, ImporterOptions::new(machine().1).timeout(SOON)).unwrap();
    let client = connect();
    let (import, _) = client.create_or_find(&wanted()).unwrap();
    check_aborted("worker", start("worker", address));
    let mut byte = [0];
    import.read(0, &mut byte).unwrap();
    assert_eq!(byte, [7], "what it wrote stays");
    assert!(client.is_owner_alive() && owner.status().buffers.len() == 1);
    connect().open("kv", Access::Read).unwrap();
}

fn an_owner_that_aborts_leaves_the_import(address: &Address) {
    let mut owner = start("owner", address);
    let mut line = String::new();
    BufReader::new(owner.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let options = ImporterOptions::new(machine().1).timeout(SOON);
    let importer = Importer::connect(address, options).unwrap();
    let import = importer.open("buffer", Access::ReadWrite).unwrap();
    assert_eq!(import.check(), ImportState::Current);
    owner.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    check_aborted("owner", owner);
    assert!(!importer.is_owner_alive());
    assert_eq!(import.check(), ImportState::OwnerGone);
    let mut byte = [0];
    import.read(0, &mut byte).unwrap();
    assert_eq!(byte, [5], "what is mapped stays");
}

fn address(name: &str) -> Address {
    let file = format!("vmm-pool-aborts-{}-{name}.sock", std::process::id());
    Address::Path(std::env::temp_dir().join(file))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, path] = &arguments[..] {
        let address = Address::Path(PathBuf::from(path));
        match role.as_str() {
            "callback" => callback_panics(),
            "driver" => {
                let (sim, driver) = machine();
                driver_panics(&sim, &driver);
            }
            "background" => background_panics(),
            "owner" => owner_panics(&address),
            "worker" => worker_panics(&address),
            other => eprintln!("no role is called {other}"),
        }
        return ExitCode::FAILURE;
    }
    if !cfg!(panic = "abort") {
        eprintln!("panics unwind in this build: tests/aborts.sh makes another one");
        return ExitCode::from(2);
    }
    errors_are_values();
    for role in ["callback", "driver", "background"] {
        check_aborted(role, start(role, &address("none")));
    }
    a_worker_that_aborts_leaves_the_owner(&address("owner"));
    an_owner_that_aborts_leaves_the_import(&address("exporter"));
    println!("all is well");
    ExitCode::SUCCESS
}
