//! The functions of the C library, as a C program calls them: answers are statuses, what went wrong is in
//! the words of the thread, and places for answers hold what the header says.
//!
//! The driver is one for the process, and so are its own pools: one machine for all cases, in turn, and at
//! the end of each cell it is as if the library had not been used.

mod blocks;
mod elastic;
mod imports;
mod pools;
mod shims;

use std::ffi::{CStr, c_void};
use std::fmt::Write as _;
use std::ptr;
use std::sync::{Arc, OnceLock};

use vmm_pool_capi::*;
use vmm_sys::object::Stream;
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, ResultCode};

use crate::engine::{Case, Done, Scene};
use crate::stage::{G, Stage, books_of_buffer, on};

/// In a place for an answer before the call.
const UNTOUCHED: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// The machine that the process's driver is, as a cell finds it.
///
/// # Panics
/// If an earlier cell, which has failed, left something on it.
fn machine() -> Arc<Sim> {
    static MACHINE: OnceLock<Arc<Sim>> = OnceLock::new();
    let made = || {
        let sim = Sim::builder().devices(2).build();
        use_driver(sim.clone()).unwrap();
        check_count(&sim);
        sim
    };
    let machine = MACHINE.get_or_init(made);
    machine.clear_faults();
    machine.check_clean().expect("a cell before this one has failed");
    machine.clone()
}

/// How many devices there are is asked once in a process, and again where that failed. No cell comes
/// before it.
fn check_count(sim: &Sim) {
    sim.inject(FaultPlan::fail(ResultCode::NOT_PERMITTED).on(Call::DeviceGetCount));
    let mut pool = ptr::without_provenance_mut(UNTOUCHED as usize);
    // SAFETY: no options, and a live place for the answer.
    let answer = told(unsafe { vmm_pool_create(ptr::null(), &raw mut pool) });
    let words = answer.unwrap_err().to_string();
    assert!(words.contains(Call::DeviceGetCount.name()), "{words}");
    assert!(words.contains(&ResultCode::NOT_PERMITTED.to_string()), "{words}");
    assert!(pool.is_null());
    sim.clear_faults();
    assert_eq!(device_count().unwrap(), 2);
}

/// The words of the thread's last failure.
fn words() -> String {
    let words = vmm_pool_last_error();
    // SAFETY: a C string that stays until this thread's next failure.
    let text = (!words.is_null()).then(|| unsafe { CStr::from_ptr(words) });
    text.map_or_else(String::new, |text| text.to_str().unwrap().to_owned())
}

/// What a function answered, whose status says what the words say.
fn told(status: i32) -> Done {
    use vmm_pool_status as Status;
    if status == Status::VMM_POOL_OK as i32 {
        return Ok(());
    }
    assert_eq!(status, vmm_pool_last_status());
    let words = words();
    let is = |expected: Status| status == expected as i32;
    let is_so = match words.contains(&ResultCode::OUT_OF_MEMORY.to_string()) {
        true if words.contains(Call::MemAddressReserve.name()) => {
            is(Status::VMM_POOL_OUT_OF_ADDRESSES)
        }
        true => is(Status::VMM_POOL_OUT_OF_MEMORY),
        false => {
            // Words of what a device or a node was found unable to.
            let unable = ["cannot serve a pool", "cannot give memory", "cannot use memory"];
            is(match unable.iter().any(|it| words.contains(it)) {
                true => Status::VMM_POOL_NOT_SUPPORTED,
                false => Status::VMM_POOL_DRIVER,
            })
        }
    };
    assert!(is_so, "status {status}: {words}");
    Err(words.into())
}

/// Runs a function that answers nothing: whether it left words behind.
fn heard(function: impl FnOnce()) -> Done {
    // A failure with words of its own.
    assert_ne!(vmm_pool_destroy(ptr::null_mut()), 0);
    let before = words();
    function();
    let after = words();
    match after == before {
        true => Ok(()),
        false => told(vmm_pool_last_status()).and(Err("words without a status".into())),
    }
}

fn raw(stream: &Stream) -> *mut c_void {
    ptr::without_provenance_mut(stream.handle().0 as usize)
}

/// A place for a handle, which was written to.
struct Place<T>(*mut T);

impl<T> Place<T> {
    fn new() -> Place<T> {
        Place(ptr::without_provenance_mut(UNTOUCHED as usize))
    }

    /// The handle; NULL beside a failure.
    fn of(self, answer: Done) -> Result<*mut T, Box<dyn std::error::Error>> {
        assert_eq!(self.0.is_null(), answer.is_err(), "what is in the place of the answer");
        assert_ne!(self.0.addr() as u64, UNTOUCHED, "the place is written to");
        answer.map(|()| self.0)
    }
}

/// A number in the place of an answer: written to by success only.
fn number(answer: Done, place: u64) -> Result<u64, Box<dyn std::error::Error>> {
    assert_eq!(place == UNTOUCHED, answer.is_err(), "what is in the place of the answer");
    answer.map(|()| place)
}

/// What a C program has.
struct Border {
    /// The machine, its streams and blocks, and the pool as Rust sees it.
    stage: Stage,
    pool: *mut VmmPool,
    elastic: Vec<*mut VmmElastic>,
    uses: Vec<*mut VmmUse>,
    /// Of PyTorch's functions.
    graphs: Vec<u64>,
    /// Of CuPy's functions: addresses.
    cupy: Vec<u64>,
    /// What was put aside counts as alive until some operation waits for the device.
    aside: bool,
}

/// Nothing was asked for.
fn nothing() -> Border {
    let stage = on(machine());
    Border {
        stage,
        pool: ptr::null_mut(),
        elastic: Vec::new(),
        uses: Vec::new(),
        graphs: Vec::new(),
        cupy: Vec::new(),
        aside: false,
    }
}

/// A pool of both devices, with memory of the host.
fn created() -> Border {
    let mut it = nothing();
    it.create().unwrap();
    it
}

impl Border {
    fn create(&mut self) -> Done {
        let devices = [0, 1];
        let options = VmmPoolOptions {
            struct_bytes: size_of::<VmmPoolOptions>() as u32,
            flags: VMM_POOL_NO_BACKGROUND,
            devices: devices.as_ptr(),
            device_count: 2,
            chunk_bytes: G,
            limit_bytes: 0,
            stock_low_bytes: 0,
            stock_high_bytes: 0,
            host_bytes: 64 * G,
            host_node: 0,
            reserved: 0,
        };
        let mut place = Place::new();
        // SAFETY: live options, and a live place for the answer.
        let answer = told(unsafe { vmm_pool_create(&raw const options, &raw mut place.0) });
        self.pool = place.of(answer)?;
        self.stage.pool = Some(inside::pool_of(self.pool)?);
        Ok(())
    }

    /// A block of the stream with this number.
    fn alloc(&mut self, stream: usize, bytes: u64) -> Done {
        let stream = &self.stage.streams[stream];
        let (device, mut place) = (stream.device().0 as i32, Place::new());
        // SAFETY: the stream is alive, and said to be gone at the end.
        let answer = told(unsafe {
            vmm_pool_alloc(self.pool, device, bytes, raw(stream), &raw mut place.0)
        });
        let address = place.of(answer)?.addr() as u64;
        self.stage.mark(address);
        self.stage.raw.push((address, bytes));
        self.stage.keeps = true;
        Ok(())
    }

    /// Gives the last block back, on the stream with this number.
    fn free(&mut self, stream: usize) -> Done {
        let Some(&(address, bytes)) = self.stage.raw.last() else { return Ok(()) };
        let block = ptr::without_provenance_mut(address as usize);
        // SAFETY: the stream is alive; no work uses the block.
        told(unsafe { vmm_pool_free(block, bytes, raw(&self.stage.streams[stream])) })?;
        self.stage.raw.pop();
        Ok(())
    }

    fn info(&self, elastic: *mut VmmElastic) -> VmmElasticState {
        // SAFETY: every bit pattern is a value.
        let mut state: VmmElasticState = unsafe { std::mem::zeroed() };
        state.struct_bytes = size_of::<VmmElasticState>() as u32;
        // SAFETY: a live place of the length that it says.
        told(unsafe { vmm_elastic_info(elastic, &raw mut state) }).unwrap();
        state
    }

    fn give_all_back(&mut self) -> Done {
        self.uses.drain(..).try_for_each(|it| told(vmm_use_end(it)))?;
        self.elastic.drain(..).try_for_each(|it| told(vmm_elastic_release(it)))?;
        for graph in self.graphs.drain(..) {
            assert_eq!(vmm_pool_torch::vmm_pool_torch_graph_destroyed(graph), 0, "{}", words());
        }
        for address in self.cupy.drain(..) {
            let block = ptr::without_provenance_mut(address as usize);
            heard(|| vmm_pool_cupy::vmm_pool_cupy_free(ptr::null_mut(), block, 0))?;
        }
        while !self.stage.raw.is_empty() {
            self.free(0)?;
        }
        for stream in &self.stage.streams {
            // SAFETY: it is alive.
            told(unsafe { vmm_pool_stream_destroyed(stream.device().0 as i32, raw(stream)) })?;
        }
        if !self.pool.is_null() {
            told(vmm_pool_destroy(self.pool))?;
        }
        vmm_pool_cupy::end_own()?;
        inside::end_own();
        Ok(())
    }
}

impl Scene for Border {
    fn sim(&self) -> Arc<Sim> {
        self.stage.sim()
    }

    fn settle(&self) {
        for elastic in &self.elastic {
            // One that sleeps says so, after what earlier operations could not do.
            // SAFETY: nobody asks for the bytes.
            unsafe { vmm_elastic_shrink(*elastic, u64::MAX, ptr::null_mut()) };
        }
        self.stage.settle();
    }

    fn picture(&self, exact: bool) -> String {
        let mut text = String::new();
        let books = self.stage.picture(exact);
        for line in books.lines().filter(|line| !self.aside || !line.starts_with("device")) {
            // The lane of a stream is made when its memory is first asked for, and stays.
            let _ = writeln!(text, "{}", line.split(" lanes ").next().unwrap_or(line));
        }
        for elastic in &self.elastic {
            let it = self.info(*elastic);
            let _ = writeln!(
                text,
                "elastic {:#x} of device {} with {} for {} uses, asleep {}",
                it.address, it.device, it.committed_bytes, it.open_uses, it.asleep
            );
            if exact {
                let _ = writeln!(text, "on devices {}, host {}", it.device_bytes, it.host_bytes);
            }
            let committed = if it.asleep == 0 { it.committed_bytes } else { 0 };
            for address in (it.address..it.address + committed).step_by(G as usize) {
                let (access, held) = (self.stage.access_at(address), self.stage.bytes_at(address));
                let _ = writeln!(text, "{address:#x} {access} {held}");
            }
        }
        for stats in self.stage.pool.iter().flat_map(|pool| pool.elastic_stats()) {
            if exact {
                let _ = writeln!(text, "{:?}", books_of_buffer(stats));
            }
        }
        text
    }

    fn laws(&self) -> Result<(), String> {
        self.stage.laws()
    }

    fn end(mut self) -> Result<(), String> {
        self.give_all_back().map_err(|error| error.to_string())?;
        self.stage.end()
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let all = [pools::cases(), blocks::cases(), elastic::cases(), imports::cases(), shims::cases()];
    all.into_iter().flatten().map(Case::alone).collect()
}
