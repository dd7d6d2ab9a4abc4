//! A server from its settings: driver, pool, models, fleet.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{Pool, text};
use vmm_pool_cli::driver_choice::{ChoiceError, DriverChoice, DriverRequest, choose_all};
use vmm_sys::object::Stream;
use vmm_sys::{ChunkProps, DeviceId, GranularityKind};

use crate::backend;
use crate::backend::sim::Bytes;
use crate::cache::{CacheSettings, Form};
use crate::clock::WallClock;
use crate::engine::{Engine, EngineError, EngineSettings, SleepMode};
use crate::fleet::Fleet;
use crate::http::Server;
use crate::meters::Meters;
use crate::model::{ModelError, ModelSpec};

/// The device that models run on, and the one that lends.
const HOME: DeviceId = DeviceId(0);
const NEIGHBOUR: DeviceId = DeviceId(1);

/// Block tables of a model take a GiB of the host's memory at most.
const TABLE_ENTRIES_MAX: u64 = 1 << 28;

/// How modelled time passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Pace {
    /// Steps take the time that the model of the device says.
    Real,
    /// Steps take no time.
    Fast,
}

/// Settings of a server.
#[derive(Clone, Debug, clap::Args)]
pub struct ServeArgs {
    /// Which driver: the GPU's, the simulated device's, or the GPU's if there is one.
    #[arg(long, value_enum, default_value = "auto")]
    pub driver: DriverRequest,
    /// How KV caches have their memory.
    #[arg(long, value_enum, default_value = "contiguous")]
    pub form: Form,
    /// A model: tiny, qwen-0.5b, llama-8b, or a JSON file; NAME=MODEL gives it another name. Several
    /// share the memory: those without requests sleep when another needs it.
    #[arg(long = "model", value_name = "[NAME=]MODEL", default_value = "tiny")]
    pub models: Vec<String>,
    /// Memory of the pool on a device, at most. Left out: all there is.
    #[arg(long, value_name = "BYTES", value_parser = text::bytes)]
    pub memory: Option<u64>,
    /// Memory of the host for parked sequences and weights that sleep there.
    #[arg(long, value_name = "BYTES", value_parser = text::bytes, default_value = "0")]
    pub host_memory: u64,
    /// What a second device lends for KV caches, if there is one.
    #[arg(long, value_name = "BYTES", value_parser = text::bytes, default_value = "0")]
    pub lend: u64,
    /// The port; 0 is any that is free.
    #[arg(long, default_value_t = 8077)]
    pub port: u16,
    /// The address to listen at.
    #[arg(long, default_value = "127.0.0.1")]
    pub bind: IpAddr,
    /// Whether modelled steps take their time.
    #[arg(long, value_enum, default_value = "real")]
    pub pace: Pace,
    /// What the simulated device does with bytes of KV caches.
    #[arg(long, value_enum, default_value = "checked")]
    pub bytes: Bytes,
    /// Requests of a model that run at a time, at most.
    #[arg(long, value_name = "N", default_value_t = 256)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_running: u32,
    /// Requests of a model that wait at a time beside those that could run, at most.
    #[arg(long, value_name = "N", default_value_t = 256)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_waiting: u32,
    /// How long a request waits for memory that others have, before it is refused.
    #[arg(long, value_name = "MS", default_value_t = 2000)]
    pub patience_ms: u64,
    /// What becomes of the weights of a model that sleeps.
    #[arg(long, value_enum, default_value = "drop")]
    pub sleep: SleepMode,
    /// After how long without requests a model sleeps. Left out: only when another needs memory.
    #[arg(long, value_name = "SECONDS")]
    pub idle_s: Option<f64>,
    /// How long requests may go on when the server ends.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0)]
    pub grace_s: f64,
}

/// A server that could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The driver.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] vmm_sys::DriverError),
    /// The pool.
    #[error(transparent)]
    Pool(#[from] vmm_pool::Error),
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Two models have one name.
    #[error("two models are called {0:?}: expected NAME=MODEL with another name")]
    SameName(String),
    /// Weights are to sleep where the pool has no memory.
    #[error("sleep = host, host_memory = 0: expected host memory as large as the weights")]
    NoHostMemory,
    /// Block tables of all requests would be too long.
    #[error(
        "model {model}: tables of {entries} blocks for {max_running} requests: expected at most \
         {TABLE_ENTRIES_MAX}, by fewer requests, a shorter context or longer blocks"
    )]
    Tables {
        /// Of which model.
        model: String,
        /// Requests that may run at a time.
        max_running: u32,
        /// Blocks of that many of the longest contexts.
        entries: u64,
    },
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {cause}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        cause: std::io::Error,
    },
    /// An engine.
    #[error("model {model}: {cause}")]
    Engine {
        /// Of which model.
        model: String,
        /// Why.
        cause: EngineError,
    },
    /// A duration.
    #[error("{setting} = {value}: expected seconds from 0 on")]
    Seconds {
        /// Which.
        setting: &'static str,
        /// What was given.
        value: f64,
    },
    /// The figures.
    #[error("the figures: {0}")]
    Meters(#[from] metrics_exporter_prometheus::BuildError),
    /// The system: threads.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// A pool over the device of the models, and the one that lends.
///
/// # Errors
/// The pool's.
pub fn pool(
    choice: &DriverChoice,
    memory: Option<u64>,
    host_memory: u64,
    lend: u64,
    background: bool,
) -> Result<Pool, ServeError> {
    let mut builder = Pool::builder(choice.driver.clone()).device(HOME).background(background);
    if let Some(bytes) = memory {
        builder = builder.limit_bytes(bytes);
    }
    if host_memory > 0 {
        builder = builder.host_memory(0, host_memory, 0);
    }
    if lend > 0 && choice.driver.device_count()? > NEIGHBOUR.0 {
        builder = builder.device(NEIGHBOUR).lend(NEIGHBOUR, lend);
    }
    Ok(builder.build()?)
}

/// The length of chunks of KV caches: the shortest there is.
///
/// # Errors
/// The driver's.
pub fn chunk_bytes(choice: &DriverChoice) -> Result<u64, ServeError> {
    let props = ChunkProps::on_device(HOME);
    Ok(choice.driver.granularity(&props, GranularityKind::Minimum)?)
}

/// Makes a server that listens, and says on what it runs.
///
/// # Errors
/// Settings that cannot be; no memory for a model; the port is taken.
pub async fn start(args: &ServeArgs) -> Result<(Server, String), ServeError> {
    if args.sleep == SleepMode::Host && args.host_memory == 0 {
        return Err(ServeError::NoHostMemory);
    }
    let choice = choose_all(args.driver, 2)?;
    let pool = pool(&choice, args.memory, args.host_memory, args.lend, true)?;
    let meters = Meters::new()?;
    let idle = args.idle_s.map(|s| seconds("idle_s", s)).transpose()?;
    seconds("grace_s", args.grace_s)?;
    let mut engines = Vec::new();
    for text in &args.models {
        let spec = ModelSpec::parse(text)?;
        let is_known = |(it, _): &(Engine, _)| it.spec().name == spec.name;
        if engines.iter().any(is_known) {
            return Err(ServeError::SameName(spec.name));
        }
        check_tables(&spec, args.form, args.max_running)?;
        let model = spec.name.clone();
        let failed = |cause| ServeError::Engine { model: model.clone(), cause };
        let mut engine = engine(args, &choice, &pool, spec)?.map_err(failed)?;
        // The next one needs the memory.
        engine.sleep().map_err(failed)?;
        engines.push((engine, meters.model(&model)));
    }
    if let Some((engine, _)) = engines.first_mut() {
        let model = engine.spec().name.clone();
        engine.wake().map_err(|cause| ServeError::Engine { model, cause })?;
    }
    let fleet = Fleet::start(&pool, engines, idle)?;
    let address = SocketAddr::new(args.bind, args.port);
    let bound = Server::bind(fleet, meters, address).await;
    let server = bound.map_err(|cause| ServeError::Listen { address, cause })?;
    Ok((server, choice.why))
}

/// Whether the tables of a batch are not too long to be made.
///
/// # Errors
/// [`ServeError::Tables`].
pub fn check_tables(spec: &ModelSpec, form: Form, max_running: u32) -> Result<(), ServeError> {
    let row_blocks = u64::from(spec.max_tokens.div_ceil(spec.block_tokens));
    let entries = row_blocks * u64::from(max_running);
    if form == Form::Paged && entries > TABLE_ENTRIES_MAX {
        let model = spec.name.clone();
        return Err(ServeError::Tables { model, max_running, entries });
    }
    Ok(())
}

/// What `--grace-s` says.
///
/// # Errors
/// A negative number.
pub fn grace(args: &ServeArgs) -> Result<Duration, ServeError> {
    seconds("grace_s", args.grace_s)
}

fn seconds(setting: &'static str, value: f64) -> Result<Duration, ServeError> {
    Duration::try_from_secs_f64(value).map_err(|_| ServeError::Seconds { setting, value })
}

fn engine(
    args: &ServeArgs,
    choice: &DriverChoice,
    pool: &Pool,
    spec: ModelSpec,
) -> Result<Result<Engine, EngineError>, ServeError> {
    let stream = Stream::create(&choice.driver, HOME)?;
    let mut cache = CacheSettings::new(args.form, &spec, chunk_bytes(choice)?);
    cache.max_sequences = args.max_running;
    cache.borrows = args.lend > 0;
    cache.host_bytes = args.host_memory;
    let settings = EngineSettings {
        max_running: args.max_running as usize,
        max_waiting: args.max_waiting as usize,
        patience_us: args.patience_ms as f64 * 1000.0,
        sleep_mode: args.sleep,
        ..EngineSettings::default()
    };
    let clock = Arc::new(WallClock::new(args.pace == Pace::Real));
    let make = backend::maker(pool, choice.sim.is_some(), args.bytes);
    Ok(Engine::build(pool, &stream, spec, &cache, settings, clock, &make))
}
