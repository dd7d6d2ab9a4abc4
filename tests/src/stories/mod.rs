//! Stories: what must come true in one situation, told once for both drivers.
//!
//! A story gets the driver that was chosen, makes its own machine, and fails by panic. `cargo test`
//! runs each as a test of its own; the program `gpu_suite` runs them on a GPU.

mod accounts;
mod contiguous;
mod drops;
mod elastic;
mod gates;
mod limits;
mod locks;
mod moves;
mod paged;
mod peers;
mod plateau;
mod shares;
mod sizes;
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_pool::{DeviceStats, Lane, Pool, PoolBuilder};
use vmm_sys::DeviceId;
use vmm_sys::object::Stream;

use crate::hold::Hold;
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip, run_or_skip};

/// One story.
pub type Story = fn(DriverChoice) -> Result<(), Skip>;

const MIB: u64 = 1 << 20;
const G: u64 = crate::machine::GPU_GRANULARITY_BYTES;

/// Hands the names of all stories about edges to a macro, by room.
#[macro_export]
macro_rules! edge_stories {
    ($then:ident) => {
        $then! {
            sizes {
                f_a1_sizes_near_the_top_are_refused
                f_a4_every_size_is_served_on_every_granularity
                f_a5_addresses_are_aligned_and_bad_alignments_refused
                f_a6_zero_bytes_from_many_threads
                sums_that_would_overflow_are_refused
                the_largest_request_fits_no_machine_and_harms_none
            }
            limits {
                f_b1_a_the_limit_is_reached_beyond_the_first_stock
                f_b1_b_a_limit_that_is_no_multiple_is_rounded_down
                f_b1_c_an_odd_stock_leaves_the_limit_usable
                f_b1_d_a_stock_above_the_limit_is_refused
                f_b1_e_the_limit_holds_over_many_rounds
                the_low_mark_stays_below_the_high_mark
                f_b3_memory_of_other_streams_is_joined
                f_g1_a_a_pending_free_is_waited_for
                f_g1_b_fragments_are_given_back
                f_g1_c_a_true_shortage_ends
                f_g1_d_chunks_of_the_wrong_length_are_given_back
                f_g2_idle_memory_does_not_count_against_the_limit
                f_g3_failures_under_contention_lose_nothing
                a_failed_request_leaves_nothing_behind
                f_x1_growth_backs_off_to_what_is_missing
            }
            gates {
                f_c3_a_slow_event_hides_no_finished_one
                f_c4_streams_may_be_dropped_before_their_work_is_done
                f_c5_a_trim_waits_for_the_work
                f_c5_the_end_of_the_pool_waits_for_the_work
                f_c5_a_shrink_waits_for_the_work
                f_c5_no_memory_goes_under_a_running_kernel
                f_c5_two_recorded_streams_are_both_waited_for
                one_gate_is_never_taken_for_another
                a_stream_of_another_device_is_waited_for
                a_gate_that_cannot_be_recorded_is_still_waited_for
                a_gate_that_cannot_be_asked_is_still_waited_for
                the_end_of_a_lane_harms_no_capture
                what_another_thread_sweeps_is_waited_for
                a_wait_keeps_nothing_from_other_threads
            }
            plateau {
                f_b5_a_loop_reaches_a_plateau
                f_e3_everything_comes_back
                f_x10_sizes_that_creep_up_hold_the_largest_and_not_the_sum
                f_x12_addresses_do_not_creep
                f_x15_trim_and_ask_again_makes_no_more_than_was_given
            }
            accounts {
                a_closed_lane_counts_until_its_last_buffer
                a_chunk_that_was_moved_twice_is_counted_once
                a_lane_that_is_closed_during_a_failure_ends
                a_chunk_whose_move_fails_is_not_lost
                stock_that_cannot_be_warmed_is_no_endless_loop
                f_k1_the_figures_of_a_shortage_are_exact
            }
            elastic {
                elastic_memory_comes_and_goes_in_place
                f_k2_the_pieces_are_what_the_driver_says
                elastic_memory_waits_for_its_uses
                elastic_memory_that_comes_back_is_used_in_order
                elastic_memory_is_read_and_written_by_a_peer
                elastic_memory_lies_on_the_host
                graphs_follow_elastic_memory
                elastic_memory_grows_ahead
            }
            moves {
                a_move_keeps_the_address_and_every_byte
                a_move_to_the_host_and_back_keeps_every_byte
                graphs_follow_moves
                many_moves_under_load_lose_nothing
                a_move_beyond_a_limit_changes_nothing
                sleep_gives_memory_back_and_waking_brings_it
            }
            shares {
                shared_chunks_are_the_same_bytes_at_both_addresses
                chunks_part_while_streams_use_them
                copies_follow_the_writes_before_them
                copies_go_through_either_address_of_a_shared_chunk
            }
            contiguous {
                a_sequence_grows_token_by_token
                memory_comes_ahead_of_the_tokens
                forks_go_their_own_ways
                a_parked_sequence_comes_back_to_its_addresses
                a_sequence_goes_on_in_memory_of_the_neighbour
                graphs_follow_a_sequence_that_grows
                graphs_follow_a_sequence_that_is_parked
            }
            paged {
                packing_keeps_every_block_while_a_step_still_reads
                parked_blocks_come_back_from_the_host
                blocks_lie_in_memory_of_the_neighbour
            }
            peers {
                f_x4_a_free_waits_for_no_other_device
                f_x14_many_peers_cost_one_grant_a_piece
            }
            drops {
                every_order_of_dropping_leaves_nothing
                f_e1_a_pool_outlives_the_handles_of_its_devices
                f_d3_buffers_are_dropped_on_threads_without_a_context
                f_d3_no_operation_changes_the_callers_context
                drops_while_unwinding_leave_nothing
                the_end_of_a_pool_with_a_thread_leaves_nothing
                f_e2_a_lost_device_is_left_in_peace
            }
        }
    };
}

/// The same for the stories about threads.
#[macro_export]
macro_rules! thread_stories {
    ($then:ident) => {
        $then! {
            threads {
                many_threads_share_a_lane
                many_lanes_grow_at_once
                buffers_travel_to_other_threads
                limits_hold_under_contention
                lanes_open_and_close_under_way
                figures_and_walker_hold_under_way
                the_walker_is_right_at_every_call_of_the_thread
            }
            locks {
                no_lock_is_held_at_the_driver
            }
        }
    };
}

macro_rules! list {
    ($($room:ident { $($name:ident)* })*) => { &[$($((stringify!($name), $room::$name as Story)),*),*] };
}

/// The stories about edges.
pub const EDGES: &[(&str, Story)] = edge_stories!(list);

/// The stories about threads.
pub const THREADS: &[(&str, Story)] = thread_stories!(list);

/// Runs one story on the driver that the environment chooses.
///
/// # Panics
/// As the story does, and if there is no story of that name.
pub fn tell(name: &str) {
    let story = EDGES.iter().chain(THREADS).find(|(known, _)| *known == name);
    let (_, story) = story.unwrap_or_else(|| panic!("no story is called {name}"));
    run_or_skip(name, *story);
}

// ---- what stories share ----

fn machine(choice: DriverChoice) -> Result<Machine, Skip> {
    Machine::new(choice, MachineSpec::default())
}

/// A pool without a thread of its own, so that counts are exact.
fn builder(machine: &Machine) -> PoolBuilder {
    Pool::builder(machine.driver().clone()).background(false)
}

fn pool(machine: &Machine) -> Pool {
    builder(machine).build().expect("a pool is built")
}

fn lane(machine: &Machine, pool: &Pool) -> Lane {
    pool.lane(&machine.stream(0)).expect("a lane is opened")
}

fn stats(pool: &Pool) -> DeviceStats {
    pool.device_stats(DeviceId(0)).expect("the pool manages device 0")
}

/// Checks that all is as it should be, at a moment when nothing happens.
fn sound(pool: &Pool) -> DeviceStats {
    pool.verify().expect("the walker finds nothing");
    let stats = stats(pool);
    assert!(stats.adds_up(), "{stats:?}");
    assert!(stats.held_bytes <= stats.limit_bytes, "{stats:?}");
    stats
}

/// Drops nothing itself: call it when everything was dropped.
fn clean(machine: &Machine) {
    if let Err(left) = machine.check_clean() {
        panic!("{left}");
    }
}

/// Work on `stream` that writes all of a buffer. The stream's device has access.
fn write_on(stream: &Stream, buffer: &vmm_pool::Buffer, value: u8) {
    // SAFETY: the pool gave the address out, for at least as many bytes.
    let filled = unsafe { stream.fill(buffer.address(), buffer.bytes(), value) };
    filled.expect("the work is enqueued");
}

/// A held stream that another thread lets go after a while.
struct Later {
    hold: Hold,
    released: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Later {
    /// Holds a stream, and lets it go from another thread after a while.
    fn release(machine: &Machine, stream: &Stream) -> Later {
        Later::of(machine.hold(stream).expect("the stream is held"))
    }

    fn of(hold: Hold) -> Later {
        let (releaser, released) = (hold.releaser(), Arc::new(AtomicBool::new(false)));
        let flag = released.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(40));
            // Before the release: whoever waited for the work sees it.
            flag.store(true, Ordering::SeqCst);
            releaser.now();
        });
        Later { hold, released, thread }
    }

    /// Whether the stream was let go.
    fn is_released(&self) -> bool {
        self.released.load(Ordering::SeqCst)
    }

    /// The work of the held stream went well.
    fn done(self) {
        self.thread.join().expect("the releasing thread ends");
        self.hold.release().expect("the held work went well");
    }
}
