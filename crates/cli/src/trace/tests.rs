use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::*;

fn read(text: &[u8]) -> Result<Trace, TraceError> {
    Trace::read(text, Path::new("dir/some.trace.gz"))
}

/// The line and the message of the error that `text` must give.
fn wrong(text: &str) -> (u64, String) {
    let error = read(text.as_bytes()).expect_err(text);
    assert!(error.to_string().starts_with("dir/some.trace.gz"), "{error}");
    (error.line(), error.to_string())
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

const GOOD: &str = "# vmm-trace 1\n\na 7 100 3 0\n  a 8 50 9 5 \r\nf 7 6\na 7 20 3 8\nf 8 9";

#[test]
fn a_trace_is_read_with_slots_used_again_and_dense_streams() {
    let trace = read(GOOD.as_bytes()).unwrap();
    assert_eq!(trace.name, "some");
    assert_eq!(
        trace.ops,
        [
            Op::Alloc { slot: 0 },
            Op::Alloc { slot: 1 },
            Op::Free { slot: 0 },
            Op::Alloc { slot: 0 },
            Op::Free { slot: 1 },
        ]
    );
    assert_eq!(
        trace.blocks,
        [
            Block { id: 7, bytes: 100, stream: 0 },
            Block { id: 8, bytes: 50, stream: 1 },
            Block { id: 7, bytes: 20, stream: 0 },
        ]
    );
    assert_eq!((trace.slots, trace.streams, trace.left_live), (2, 2, 1));
    assert_eq!(trace.peak_live_bytes, 150);
}

#[test]
fn gzip_is_known_by_its_first_bytes_not_by_the_name() {
    let plain = read(GOOD.as_bytes()).unwrap();
    assert_eq!(read(&gzip(GOOD.as_bytes())).unwrap(), plain);
    // Several members in one file, as `cat` makes of two archives.
    let (first, second) = GOOD.split_at(20);
    let members = [gzip(first.as_bytes()), gzip(second.as_bytes())].concat();
    assert_eq!(read(&members).unwrap(), plain);
}

#[test]
fn a_source_that_gives_single_bytes_reads_the_same() {
    struct Dribble(Vec<u8>, usize);
    impl Read for Dribble {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let Some(byte) = self.0.get(self.1) else { return Ok(0) };
            buffer[0] = *byte;
            self.1 += 1;
            Ok(1)
        }
    }
    let packed = Dribble(gzip(GOOD.as_bytes()), 0);
    let trace = Trace::read(packed, Path::new("some.trace")).unwrap();
    assert_eq!(trace, read(GOOD.as_bytes()).unwrap());
}

#[test]
fn every_wrong_shape_names_line_expectation_and_finding() {
    for (text, line) in [
        ("x 1 2 3 4", 1),
        ("a 1 2 3", 1),
        ("a 1 2 0 4 5", 1),
        ("a 1 2 0 4 # note", 1),
        ("a 1 512 0 0\nf 1", 2),
        ("a 1 512 0 0\nf 1 2 3", 2),
        ("# c\n\nalloc 1 512 0 0", 3),
        ("A 1 512 0 0", 1),
    ] {
        let (at, message) = wrong(text);
        assert_eq!(at, line, "{message}");
        let last = text.lines().last().unwrap();
        let expected = "expected a line `a ID BYTES STREAM T_US`, `f ID T_US` or `# comment`";
        assert!(message.contains(expected), "{message}");
        assert!(message.contains(&format!("found `{last}`")), "{message}");
    }
}

#[test]
fn numbers_must_be_plain_decimal_and_in_range() {
    for (text, field, found) in [
        ("a x 512 0 0", "ID", "x"),
        ("a -1 512 0 0", "ID", "-1"),
        ("a +1 512 0 0", "ID", "+1"),
        ("a 18446744073709551616 512 0 0", "ID", "18446744073709551616"),
        ("a 1 -0 0 0", "BYTES", "-0"),
        ("a 1 5.0 0 0", "BYTES", "5.0"),
        ("a 1 0x10 0 0", "BYTES", "0x10"),
        ("a 1 99999999999999999999 0 0", "BYTES", "99999999999999999999"),
        ("a 1 512 s0 0", "STREAM", "s0"),
        ("a 1 512 0 1e3", "T_US", "1e3"),
        ("a 1 512 0 -4", "T_US", "-4"),
        ("f x 0", "ID", "x"),
        ("f 1 soon", "T_US", "soon"),
    ] {
        let (line, message) = wrong(text);
        assert_eq!(line, 1);
        assert!(message.contains(&format!("expected {field} as a decimal number")), "{message}");
        assert!(message.contains(&format!("found `{found}`")), "{message}");
    }
}

#[test]
fn blocks_must_be_free_to_be_allocated_and_live_to_be_freed() {
    let (line, message) = wrong("a 1 512 0 0\n# between\na 1 512 0 1");
    assert_eq!(line, 3);
    assert!(message.contains("found 1, allocated on line 1 and not freed"), "{message}");
    let (line, message) = wrong("a 1 512 0 0\nf 2 1");
    assert_eq!(line, 2);
    assert!(message.contains("expected the ID of a live block, found 2"), "{message}");
    let (line, _) = wrong("a 1 512 0 0\nf 1 1\nf 1 2");
    assert_eq!(line, 3);
}

#[test]
fn a_sum_past_64_bits_is_an_error_not_a_wrap() {
    let (line, message) = wrong("a 1 18446744073709551615 0 0\na 2 1 0 0");
    assert_eq!(line, 2);
    assert!(message.contains("18446744073709551615 + 1"), "{message}");
    // What was freed makes room again.
    let text = "a 1 18446744073709551615 0 0\nf 1 0\na 2 1 0 0";
    assert_eq!(read(text.as_bytes()).unwrap().peak_live_bytes, u64::MAX);
}

#[test]
fn nothing_to_replay_is_an_error_of_the_whole_file() {
    for text in ["", "# only a comment\n", "\n\n", "a 1 0 0 0\nf 1 0\n"] {
        let (line, message) = wrong(text);
        assert_eq!(line, 0);
        assert!(
            message.contains("expected at least one allocation of at least one byte"),
            "{message}"
        );
    }
}

#[test]
fn more_streams_than_can_be_indexed_are_an_error() {
    let mut text = String::new();
    for stream in 0..=u16::MAX as u64 {
        text.push_str(&format!("a {stream} 1 {stream} 0\n"));
    }
    let (line, message) = wrong(&text);
    assert_eq!(line, u16::MAX as u64 + 1);
    assert!(message.contains("at most 65535 streams"), "{message}");
}

#[test]
fn a_file_cut_short_is_an_error_at_its_line() {
    let mut text = String::new();
    for id in 0..5000 {
        text.push_str(&format!("a {id} {} 0 {id}\n", id * 7919 + 1));
    }
    let packed = gzip(text.as_bytes());
    for keep in [3, 20, packed.len() / 2, packed.len() - 1] {
        let error = read(&packed[..keep]).expect_err("cut short");
        assert!(matches!(error.problem(), Problem::Io(_)), "{error}");
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }
    let mut damaged = packed.clone();
    damaged[packed.len() / 2] ^= 0x55;
    read(&damaged).expect_err("a damaged archive");
}

#[test]
fn binary_and_endless_lines_are_refused_without_reading_them_whole() {
    let error = read(&[0xff, 0x00, 0x9c, b'\n']).expect_err("binary");
    assert!(error.to_string().contains(r"found `\xff\x00\x9c`"), "{error}");
    let endless = std::io::repeat(b'a');
    let error = Trace::read(endless, Path::new("zeros")).expect_err("endless");
    assert!(matches!(error.problem(), Problem::LongLine { most: 4096 }), "{error}");
    let (_, message) = wrong(&format!("a {}", "9".repeat(300)));
    assert!(message.ends_with("…`"), "{message}");
}

#[test]
fn a_missing_file_is_named() {
    let error = Trace::open(Path::new("/no/such/file.trace")).expect_err("missing");
    assert_eq!(error.line(), 0);
    assert!(error.to_string().starts_with("/no/such/file.trace: cannot be read"), "{error}");
}
