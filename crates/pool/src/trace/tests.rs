//! The recorder by itself; a whole run is recorded and replayed in the program's own tests.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use super::*;

/// A destination that takes so many bytes, and then no more.
struct Narrow {
    left: usize,
    taken: Arc<Mutex<Vec<u8>>>,
}

impl Write for Narrow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.left < bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.left -= bytes.len();
        self.taken.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A recorder, and what it wrote.
fn recorder(room: usize) -> (Arc<Recorder>, Arc<Mutex<Vec<u8>>>) {
    let taken = Arc::new(Mutex::new(Vec::new()));
    let out = Narrow { left: room, taken: taken.clone() };
    let file = TraceFile::new(PathBuf::from("narrow"), out);
    (Recorder::write_to(file).unwrap(), taken)
}

fn lane(recorder: &Arc<Recorder>, lane: u64, stream: u64) -> LaneTrace {
    LaneTrace::new(recorder, lane, DeviceId(0), StreamId(stream))
}

/// The lines without their times, which must not fall.
fn lines(taken: &Mutex<Vec<u8>>) -> Vec<String> {
    let text = String::from_utf8(taken.lock().clone()).unwrap();
    let mut last = 0;
    text.lines()
        .map(|line| {
            if line.starts_with('#') {
                return line.to_owned();
            }
            let (line, time) = line.rsplit_once(' ').unwrap();
            let time: u64 = time.parse().unwrap();
            assert!(time >= last, "{text}");
            last = time;
            line.to_owned()
        })
        .collect()
}

#[test]
fn lines_come_in_one_order_with_ids_of_their_own() {
    let (recorder, taken) = recorder(usize::MAX);
    let (first, second) = (lane(&recorder, 1, 70), lane(&recorder, 2, 71));
    first.alloc(0, 100);
    second.alloc(0, 200);
    first.free(0);
    first.alloc(0, 300);
    second.free(0);
    second.free(0); // nothing is live there
    drop((first, second, recorder));
    assert_eq!(
        lines(&taken),
        [
            "# stream 0 is stream 70 of device 0",
            "a 0 100 0",
            "# stream 1 is stream 71 of device 0",
            "a 1 200 1",
            "f 0",
            "a 2 300 0",
            "f 1",
        ]
    );
}

#[test]
fn a_lane_that_outlives_its_pool_is_recorded_to_the_end() {
    let (recorder, taken) = recorder(usize::MAX);
    let lane = lane(&recorder, 1, 70);
    lane.alloc(512, 100);
    drop(recorder);
    lane.free(512);
    drop(lane);
    assert_eq!(lines(&taken)[1..], ["a 0 100 0", "f 0"]);
}

#[test]
fn a_full_disk_ends_the_recording_and_nothing_else() {
    let (recorder, taken) = recorder(100);
    let lane = lane(&recorder, 1, 70);
    // More than may be pending: nobody waits for a writer that is gone.
    for index in 0..2 * PENDING_MAX as u64 {
        lane.alloc(index, 1);
        lane.free(index);
    }
    assert!(recorder.recording().is_none());
    assert!(taken.lock().len() <= 100);
    drop((lane, recorder));
}

#[test]
fn whoever_records_waits_for_a_slow_writer() {
    struct Slow(Arc<Mutex<usize>>);
    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            *self.0.lock() += bytes.iter().filter(|byte| **byte == b'\n').count();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            thread::sleep(Duration::from_millis(20));
            Ok(())
        }
    }
    let written = Arc::new(Mutex::new(0));
    let file = TraceFile::new(PathBuf::from("slow"), Slow(written.clone()));
    let recorder = Recorder::write_to(file).unwrap();
    let lane = lane(&recorder, 1, 70);
    let pairs = PENDING_MAX as u64;
    for index in 0..pairs {
        lane.alloc(index, 1);
        lane.free(index);
        assert!(recorder.shared.state.lock().pending.len() <= PENDING_MAX + 1);
    }
    drop((lane, recorder));
    assert_eq!(*written.lock() as u64, 1 + 2 * pairs);
}

#[test]
fn two_pools_of_a_process_never_share_a_file() {
    let folder = std::env::temp_dir().join(format!("vmm-pool-trace-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("run-%p.trace");
    let named = |suffix: &str| folder.join(format!("run-{}.trace{suffix}", std::process::id()));
    let first = TraceFile::create(&path).unwrap();
    let second = TraceFile::create(&path).unwrap();
    assert_eq!((first.path(), second.path()), (&*named(""), &*named(".2")));
    drop(first);
    assert_eq!(TraceFile::create(&path).unwrap().path(), named(""));
    drop(second);
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_file_that_cannot_be_made_is_a_bad_setting() {
    for path in ["/no/such/folder/trace", "/dev/full"] {
        let error = Recorder::start(Path::new(path), &Settings::default()).unwrap_err();
        assert!(matches!(&error, Error::BadSetting { setting: "trace", .. }), "{error}");
        let start = format!("trace = {path}: expected the path of a file that can be written");
        assert!(error.to_string().starts_with(&start), "{error}");
    }
    // A path that was refused is free again, and nothing was left of the first try.
    let error = Recorder::start(Path::new("/dev/full"), &Settings::default()).unwrap_err();
    assert!(!error.to_string().contains("full.2"), "{error}");
}
