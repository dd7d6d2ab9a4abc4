//! Launches.

use std::ffi::c_void;

use vmm_sys::{ResultCode, StreamHandle};

use crate::door::{Done, Refusal};
use crate::kernels::PARAMETERS_MAX;
use crate::machine::{current, machine};

/// The most threads of a block, and the most blocks along y and z.
const THREADS_MAX: u64 = 1024;

/// `CUlaunchConfig`.
#[repr(C)]
pub(crate) struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: u64,
    attributes: *mut c_void,
    attribute_count: u32,
}

/// The arguments of a launch, each read with the width that its parameter has.
fn read_arguments(
    widths: &[usize],
    places: *const *const c_void,
    extra: *const c_void,
) -> Result<[u64; PARAMETERS_MAX], Refusal> {
    let mut arguments = [0; PARAMETERS_MAX];
    if !widths.is_empty() && places.is_null() {
        return Err(match extra.is_null() {
            true => Refusal::new(ResultCode::INVALID_VALUE, "the kernel takes arguments"),
            false => Refusal::new(ResultCode::NOT_SUPPORTED, "arguments in one buffer"),
        });
    }
    for (index, (width, argument)) in widths.iter().zip(&mut arguments).enumerate() {
        // SAFETY: the caller has one place for each parameter of the kernel.
        let place = unsafe { places.add(index).read() };
        if place.is_null() {
            let why = format_args!("null in the place of argument {index}");
            return Err(Refusal::new(ResultCode::INVALID_VALUE, why));
        }
        // SAFETY: not null, and the caller has an argument of the parameter's width there.
        *argument = unsafe {
            match width {
                4 => u64::from(place.cast::<u32>().read_unaligned()),
                _ => place.cast::<u64>().read_unaligned(),
            }
        };
    }
    Ok(arguments)
}

fn launch(
    function: u64,
    [grid, block]: [[u32; 3]; 2],
    stream: u64,
    places: *const *const c_void,
    extra: *const c_void,
) -> Done {
    let (sim, device) = current()?;
    let threads = block.iter().map(|side| u64::from(*side)).product::<u64>();
    if grid.contains(&0) || threads == 0 || threads > THREADS_MAX {
        let why = format_args!("a grid of {grid:?} blocks of {block:?} threads");
        return Err(Refusal::new(ResultCode::INVALID_VALUE, why));
    }
    let function = machine()?.modules.lock().function(function)?.clone();
    if function.device != device {
        let why =
            format_args!("the function was loaded on {}, and {device} is current", function.device);
        return Err(Refusal::new(ResultCode::INVALID_HANDLE, why));
    }
    let arguments = read_arguments(function.kernel.parameter_bytes(), places, extra)?;
    Ok(function.kernel.launch(sim, device, StreamHandle(stream), arguments)?)
}

entries! {
    fn cuLaunchKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared_bytes: u32, stream: u64, arguments: *const *const c_void, extra: *const c_void,
    ) {
        let shape = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]];
        launch(function, shape, stream, arguments, extra)
    }

    /// Every kernel here runs as a whole.
    fn cuLaunchCooperativeKernel(
        function: u64, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        _shared_bytes: u32, stream: u64, arguments: *const *const c_void,
    ) {
        let shape = [[grid_x, grid_y, grid_z], [block_x, block_y, block_z]];
        launch(function, shape, stream, arguments, std::ptr::null())
    }

    /// Without attributes: what they ask for cannot be promised.
    fn cuLaunchKernelEx(
        config: *const LaunchConfig, function: u64, arguments: *const *const c_void, extra: *const c_void,
    ) {
        if config.is_null() {
            return Err(Refusal::new(ResultCode::INVALID_VALUE, "null in the place of a shape"));
        }
        // SAFETY: not null, and the caller has a configuration there.
        let LaunchConfig { grid, block, stream, attribute_count, .. } = unsafe { config.read() };
        if attribute_count != 0 {
            let why = format_args!("{attribute_count} launch attributes");
            return Err(Refusal::new(ResultCode::NOT_SUPPORTED, why));
        }
        launch(function, [grid, block], stream, arguments, extra)
    }
}
