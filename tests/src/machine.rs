//! The machine under a test: the simulated device, or the GPUs of this host.
//!
//! Tests ask for what they need ([`MachineSpec`]); what a real GPU cannot be (another granularity,
//! less memory) is a [`Skip`] with its reason, counted and printed, never a silent success.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use vmm_sys::cuda::Cuda;
use vmm_sys::object::{Stream, failed_drops, retry_failed_drops};
use vmm_sys::sim::{Sim, TimeMode};
use vmm_sys::{DeviceId, Driver, DriverResult, ProbeKernel};

use crate::hold::{Hold, Words, keep_busy};

/// The environment variable that chooses the driver: `sim` (the default) or `cuda`.
pub const DRIVER_VARIABLE: &str = "VMM_TEST_DRIVER";

/// Which driver tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverChoice {
    /// The simulated device.
    Sim,
    /// The GPUs of this host.
    Cuda,
}

/// The driver that the environment asks for.
///
/// # Panics
/// If the variable is neither `sim` nor `cuda`: a typing mistake must not pass as a test.
pub fn any_driver() -> DriverChoice {
    match std::env::var(DRIVER_VARIABLE).as_deref() {
        Err(_) | Ok("sim") => DriverChoice::Sim,
        Ok("cuda") => DriverChoice::Cuda,
        Ok(other) => panic!("{DRIVER_VARIABLE}={other}: expected sim or cuda"),
    }
}

/// Why a test was not run on this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip(String);

impl Skip {
    /// For this reason.
    pub fn because(reason: impl fmt::Display) -> Skip {
        Skip(reason.to_string())
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a test needs of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineSpec {
    /// Number of devices.
    pub devices: u32,
    /// Granularity of device memory, in bytes.
    pub granularity_bytes: u64,
    /// The memory of each device, in bytes, where it matters.
    pub device_bytes: Option<u64>,
    /// Whether work takes its modelled time (a GPU's always takes its own).
    pub modelled_time: bool,
    /// How long a call waits for a held stream before the simulated device says that nothing will
    /// let it go.
    pub blocked_limit: Duration,
}

/// The granularity of every GPU that was measured.
pub const GPU_GRANULARITY_BYTES: u64 = 2 << 20;

/// Free memory that a test may count on, on a GPU.
const GPU_FREE_BYTES: u64 = 8 << 30;

impl Default for MachineSpec {
    fn default() -> MachineSpec {
        MachineSpec {
            devices: 1,
            granularity_bytes: GPU_GRANULARITY_BYTES,
            device_bytes: None,
            modelled_time: false,
            blocked_limit: Duration::from_secs(20),
        }
    }
}

/// A machine for one test.
#[derive(Clone, Debug)]
pub struct Machine {
    driver: Arc<dyn Driver>,
    sim: Option<Arc<Sim>>,
    devices: u32,
    granularity_bytes: u64,
    words: Arc<Words>,
    /// Free memory of each device before the test, on a GPU.
    free_before: Vec<u64>,
}

impl Machine {
    /// A machine as `spec` asks, of the kind that was chosen.
    ///
    /// # Errors
    /// [`Skip`] where the GPUs of this host cannot be that machine.
    pub fn new(choice: DriverChoice, spec: MachineSpec) -> Result<Machine, Skip> {
        match choice {
            DriverChoice::Sim => Ok(Machine::simulated(spec)),
            DriverChoice::Cuda => Machine::real(spec),
        }
    }

    /// A simulated machine as `spec` asks.
    pub fn simulated(spec: MachineSpec) -> Machine {
        let mut builder = Sim::builder()
            .devices(spec.devices as usize)
            .granularity(spec.granularity_bytes, spec.granularity_bytes)
            .blocked_limit(spec.blocked_limit)
            .time(if spec.modelled_time { TimeMode::Modelled } else { TimeMode::Instant });
        if let Some(bytes) = spec.device_bytes {
            builder = builder.device_bytes(bytes);
        }
        let sim = builder.build();
        let driver: Arc<dyn Driver> = sim.clone();
        Machine {
            words: Words::new(&driver),
            driver,
            sim: Some(sim),
            devices: spec.devices,
            granularity_bytes: spec.granularity_bytes,
            free_before: Vec::new(),
        }
    }

    fn real(spec: MachineSpec) -> Result<Machine, Skip> {
        if spec.granularity_bytes != GPU_GRANULARITY_BYTES {
            let bytes = spec.granularity_bytes;
            return Err(Skip::because(format_args!("needs a granularity of {bytes} bytes")));
        }
        if let Some(bytes) = spec.device_bytes.filter(|bytes| *bytes < GPU_FREE_BYTES) {
            return Err(Skip::because(format_args!("needs a device of {bytes} bytes")));
        }
        let driver = cuda()?;
        let count = driver.device_count().map_err(Skip::because)?;
        if count < spec.devices {
            return Err(Skip::because(format_args!("needs {} devices, has {count}", spec.devices)));
        }
        let mut machine = Machine {
            words: Words::new(&driver),
            driver,
            sim: None,
            devices: spec.devices,
            granularity_bytes: spec.granularity_bytes,
            free_before: Vec::new(),
        };
        for device in machine.devices() {
            machine.warm_up(device)?;
            settle_streams(&machine.driver, device)?;
            let free_bytes = machine.driver.mem_info(device).map_err(Skip::because)?.free_bytes;
            if free_bytes < GPU_FREE_BYTES {
                return Err(Skip::because(format_args!("only {free_bytes} bytes are free")));
            }
            machine.free_before.push(free_bytes);
        }
        Ok(machine)
    }

    /// Makes the driver take what it takes once for itself: the context, the kernels.
    fn warm_up(&self, device: DeviceId) -> Result<(), Skip> {
        let stream = Stream::create(&self.driver, device).map_err(Skip::because)?;
        let kernel = ProbeKernel::Spin { busy_us: 1, done: 0 };
        // SAFETY: the stream is live; the kernel touches no memory.
        let launched = unsafe { self.driver.launch(device, &kernel, stream.handle()) };
        launched.and_then(|()| stream.synchronize()).map_err(Skip::because)
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// The simulated device.
    ///
    /// # Errors
    /// [`Skip`] on a GPU.
    pub fn sim(&self) -> Result<&Arc<Sim>, Skip> {
        self.sim.as_ref().ok_or_else(|| Skip::because("needs the simulated device"))
    }

    /// The devices.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.devices).map(DeviceId)
    }

    /// The granularity of device memory, in bytes.
    pub fn granularity_bytes(&self) -> u64 {
        self.granularity_bytes
    }

    /// A new stream of a device.
    ///
    /// # Panics
    /// If the driver refuses.
    pub fn stream(&self, device: u32) -> Stream {
        Stream::create(&self.driver, DeviceId(device)).expect("a test's stream is made")
    }

    /// Holds a stream: work enqueued from now on waits.
    ///
    /// # Errors
    /// The driver's.
    pub fn hold(&self, stream: &Stream) -> DriverResult<Hold> {
        Hold::on(&self.words, stream)
    }

    /// Checks that everything was given back. Call it when all that was made is dropped.
    ///
    /// # Errors
    /// What is left, in words.
    pub fn check_clean(&self) -> Result<(), String> {
        self.words.give_back();
        let left = retry_failed_drops(&self.driver);
        if left > 0 {
            return Err(format!("{left} kept back: {:?}", failed_drops(&self.driver)));
        }
        if let Some(sim) = &self.sim {
            return sim.check_clean();
        }
        for (device, before) in self.devices().zip(&self.free_before) {
            let info = self.driver.mem_info(device).map_err(|error| error.to_string())?;
            if info.free_bytes + self.granularity_bytes < *before {
                return Err(format!("{device}: free {before} before, {} now", info.free_bytes));
            }
        }
        Ok(())
    }
}

/// Streams that stories have alive at once, at most.
const STREAMS_MAX: usize = 48;

/// Has the driver make what it keeps for streams, once a device and process: it takes device
/// memory of its own for them, which would look like a leak of the story that made them first.
fn settle_streams(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<(), Skip> {
    static SETTLED: Mutex<Vec<DeviceId>> = Mutex::new(Vec::new());
    let mut settled = SETTLED.lock().expect("nobody panics while settling");
    if settled.contains(&device) {
        return Ok(());
    }
    let made: Result<Vec<Stream>, _> =
        (0..STREAMS_MAX).map(|_| Stream::create(driver, device)).collect();
    for stream in made.map_err(Skip::because)? {
        keep_busy(&stream, 1).map_err(Skip::because)?;
        stream.synchronize().map_err(Skip::because)?;
    }
    settled.push(device);
    Ok(())
}

/// The one CUDA driver of the process.
fn cuda() -> Result<Arc<dyn Driver>, Skip> {
    static CUDA: OnceLock<Result<Arc<dyn Driver>, Skip>> = OnceLock::new();
    let open = || match Cuda::open() {
        Ok(driver) => Ok(driver as Arc<dyn Driver>),
        Err(error) => Err(Skip::because(error)),
    };
    CUDA.get_or_init(open).clone()
}

/// Runs one test on the driver that the environment chooses; prints and counts it if it is skipped.
///
/// # Panics
/// As the test does.
pub fn run_or_skip(name: &str, test: impl FnOnce(DriverChoice) -> Result<(), Skip>) {
    static SKIPPED: AtomicU64 = AtomicU64::new(0);
    let choice = any_driver();
    if let Err(reason) = test(choice) {
        assert_eq!(choice, DriverChoice::Cuda, "{name}: the simulated device can be any machine");
        let count = SKIPPED.fetch_add(1, Ordering::Relaxed) + 1;
        println!("{name}: skipped ({count} so far): {reason}");
    }
}
