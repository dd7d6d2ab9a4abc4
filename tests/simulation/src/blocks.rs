//! Memory of lanes: asked for, used by several streams, compared, handed to other actors, freed.

use vmm_pool::{Buffer, Lane, Request, free_raw, free_raw_on, record_stream_raw};
use vmm_sys::object::{RelaxedCapture, Stream};

use crate::actor::Actor;
use crate::coverage::Outcome;
use crate::judge::Kind;
use crate::kernels::Contents;

/// A buffer, or a plain address.
enum Memory {
    Buffer(Buffer),
    Raw,
}

/// Memory of a lane with contents of its own.
pub(crate) struct Block {
    memory: Memory,
    contents: Contents,
    /// The lane's.
    stream: Stream,
    /// Others that use it.
    users: Vec<Stream>,
    owner: usize,
    /// Whether it holds its contents: the kernel that writes them may be made to fail.
    is_written: bool,
}

impl Block {
    fn name(&self) -> String {
        let Contents { address, bytes, version } = self.contents;
        format!("block {version} ({bytes} bytes at {address:#x})")
    }
}

const LENGTHS: &[u64] = &[1, 4, 700, 5000, 60 << 10, 100 << 10, 300 << 10];

impl Actor {
    fn length(&mut self) -> u64 {
        let chunk_bytes = self.world.setup.chunk_bytes;
        match self.rng.below(10) {
            0..6 => self.rng.pick(LENGTHS) + self.rng.below(300) * 4,
            6..8 => chunk_bytes,
            8 => chunk_bytes * (1 + self.rng.below(3)) - self.rng.below(5000),
            _ => 1 + self.rng.below(chunk_bytes),
        }
    }

    fn request(&mut self) -> Request {
        let bytes = self.length();
        let mut request = Request::new(bytes);
        if self.rng.chance(300) {
            request = request.no_wait();
        }
        if self.rng.chance(150) {
            request = request.align(self.rng.pick(&[4, 512, 4096, 64 << 10]));
        }
        if self.rng.chance(400) {
            request = request.may_borrow();
        }
        request
    }

    /// A lane of a shared stream, or of an own one.
    pub(crate) fn any_lane(&mut self) -> Option<Lane> {
        let at = self.rng.below(self.world.streams.len() as u64 + 1) as usize;
        let stream = self.world.streams.get(at).unwrap_or(&self.own).clone();
        self.lane_of(&stream)
    }

    pub(crate) fn lane_of(&self, stream: &Stream) -> Option<Lane> {
        self.judge("lane", self.world.pool.lane(stream), &[])
    }

    pub(crate) fn alloc(&mut self) {
        let Some(lane) = self.any_lane() else { return };
        let request = self.request();
        let may = &[Kind::Closed];
        if self.rng.chance(250) {
            let asked = lane.alloc_raw_with(&request);
            if let Some(address) = self.judge("alloc a plain address", asked, may) {
                self.feature("plain addresses");
                self.born(&lane, address, request.bytes(), Memory::Raw);
            }
            return;
        }
        let waits = self.world.has_holds() && request.may_wait();
        if let Some(buffer) = self.judge("alloc", lane.alloc_with(&request), may) {
            if waits {
                self.feature("requests that waited for held streams");
            }
            let (address, bytes) = (buffer.address(), buffer.bytes());
            self.born(&lane, address, bytes, Memory::Buffer(buffer));
        }
    }

    fn born(&mut self, lane: &Lane, address: u64, bytes: u64, memory: Memory) {
        let version = self.world.next_version();
        let contents = Contents { address, bytes, version };
        let stream = lane.stream().clone();
        let written = self.drive("a write", self.world.write(&stream, contents));
        let (owner, is_written) = (self.number, written.is_some());
        let block = Block { memory, contents, stream, users: Vec::new(), owner, is_written };
        self.say(&format!("has {} on {:?}", block.name(), block.stream.handle()));
        self.blocks.push(block);
    }

    fn any_block(&mut self) -> Option<usize> {
        let count = self.blocks.len() as u64;
        (count > 0).then(|| self.rng.below(count) as usize)
    }

    /// A second stream uses a block: it compares the contents and writes them again.
    pub(crate) fn touch(&mut self) {
        let Some(at) = self.any_block() else { return };
        let device = self.blocks[at].stream.device();
        let world = self.world.clone();
        let near: Vec<&Stream> = match world.setup.peers && self.rng.chance(300) {
            true => world.streams.iter().collect(),
            false => world.streams_of(device).collect(),
        };
        let other = self.rng.pick(&near).clone();
        let Block { contents, stream, is_written, .. } = &self.blocks[at];
        let (contents, is_written, stream) = (*contents, *is_written, stream.clone());
        if self.drive("an event", world.order(&stream, &other)).is_none() {
            return;
        }
        let recorded = match &mut self.blocks[at].memory {
            Memory::Buffer(buffer) => buffer.record_stream(&other),
            Memory::Raw if contents.bytes == 0 => Ok(()),
            Memory::Raw => record_stream_raw(contents.address, &other),
        };
        if self.judge("record a stream", recorded, &[]).is_none() || !is_written {
            return;
        }
        let what = format!("actor {}, {}", self.number, self.blocks[at].name());
        self.drive("a check", world.check(&other, contents, what));
        self.drive("a write", world.write(&other, contents));
        if other.id() != stream.id() {
            self.feature("blocks used by a second stream");
            if other.device() != device {
                self.feature("blocks used by another device");
            }
        }
        self.blocks[at].users.push(other);
        self.came_out("touch", Outcome::Done, "done");
    }

    /// Compares a block by its own stream, or by the host.
    pub(crate) fn look(&mut self) {
        let Some(at) = self.any_block() else { return };
        let by_host = self.rng.chance(250);
        let block = self.blocks.swap_remove(at);
        if by_host {
            self.look_from_the_host(&block)
        } else {
            self.compare(&block)
        };
        self.blocks.push(block);
        self.came_out("look", Outcome::Done, "done");
    }

    fn compare(&self, block: &Block) {
        if block.is_written {
            let what = format!("actor {}, {}", self.number, block.name());
            self.drive("a check", self.world.check(&block.stream, block.contents, what));
            self.feature("blocks compared");
        }
    }

    fn look_from_the_host(&self, block: &Block) {
        let Memory::Buffer(buffer) = &block.memory else { return };
        if !block.is_written {
            return;
        }
        let Some(_calm) = self.drive("calm", RelaxedCapture::enter(&self.world.driver)) else {
            return;
        };
        for stream in block.users.iter().chain([&block.stream]) {
            if self.drive("a wait", stream.synchronize()).is_none() {
                return;
            }
        }
        let mut found = Vec::new();
        for (offset, bytes) in block.contents.edges() {
            let mut edge = vec![0; bytes as usize];
            if self.judge("read", buffer.read(offset, &mut edge), &[]).is_none() {
                return;
            }
            found.push(edge);
        }
        let compared = block.contents.compare(&found);
        assert!(
            compared.is_ok(),
            "actor {}, the host reads {}: {compared:?}",
            self.number,
            block.name()
        );
        self.feature("blocks compared by the host");
    }

    pub(crate) fn free(&mut self) {
        let Some(at) = self.any_block() else { return };
        let block = self.blocks.swap_remove(at);
        self.free_block(block);
    }

    pub(crate) fn free_block(&mut self, block: Block) {
        self.compare(&block);
        if block.owner != self.number {
            self.feature("blocks freed by another actor");
        }
        self.say(&format!("frees {}", block.name()));
        let Contents { address, bytes, .. } = block.contents;
        match block.memory {
            Memory::Buffer(buffer) => {
                drop(buffer);
                self.came_out("free", Outcome::Done, "done");
            }
            Memory::Raw => {
                let freed = match self.rng.chance(500) {
                    true => free_raw(address, bytes),
                    false => free_raw_on(address, bytes, block.stream.handle()),
                };
                // It cannot fail: a block that was given out is there.
                freed.unwrap_or_else(|error| panic!("{address:#x} is not freed: {error}"));
                self.came_out("free a plain address", Outcome::Done, "done");
            }
        }
    }

    pub(crate) fn free_all(&mut self) {
        while let Some(block) = self.blocks.pop() {
            self.free_block(block);
        }
    }

    /// Hands a block to whoever takes it; not one of its own stream, which it captures without a word.
    pub(crate) fn offer(&mut self) {
        let own = self.own.id();
        let Some(at) = self.any_block().filter(|at| self.blocks[*at].stream.id() != own) else {
            return;
        };
        let block = self.blocks.swap_remove(at);
        self.say(&format!("offers {}", block.name()));
        self.world.offer(block);
        self.came_out("offer", Outcome::Done, "done");
    }

    pub(crate) fn take(&mut self) {
        if let Some(block) = self.world.take_offer(self.rng.next_u64()) {
            self.say(&format!("takes {}", block.name()));
            self.blocks.push(block);
            self.came_out("take", Outcome::Done, "done");
        }
    }
}
