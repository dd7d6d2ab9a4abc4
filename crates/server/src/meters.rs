//! Figures as Prometheus takes them: one recorder a server, no global one.

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{
    BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use vmm_pool::{DeviceStats, Pool};

use crate::engine::{EngineFigures, StepFigures};

const METADATA: Metadata<'static> = Metadata::new("vmm_server", Level::INFO, Some("vmm_server"));

const STEP_US: &str = "vmm_step_us";
/// Upper ends of the histogram of step times, in microseconds.
const STEP_BUCKETS_US: [f64; 14] =
    [100.0, 200.0, 500.0, 1e3, 2e3, 3e3, 5e3, 7.5e3, 10e3, 15e3, 25e3, 50e3, 100e3, 1e6];

/// Names, units and what they mean.
const COUNTERS: [(&str, &str); 8] = [
    ("vmm_requests_total", "requests that ended, by outcome"),
    ("vmm_tokens_total", "tokens of prompts that were written, and tokens that were answered"),
    ("vmm_kv_mismatches_total", "sequences whose KV memory read otherwise than it was written"),
    ("vmm_preemptions_total", "sequences parked on the host, brought back, or dropped"),
    ("vmm_steps_total", "steps"),
    ("vmm_sleeps_total", "how often the model fell asleep"),
    ("vmm_wakes_total", "how often the model woke"),
    ("vmm_kv_growths_total", "growths of the cache, ahead of need or waited for"),
];
const GAUGES: [(&str, &str); 5] = [
    ("vmm_requests", "requests that run, are parked, or wait"),
    ("vmm_kv_bytes", "memory of the cache by kind: committed + shared = live + slack + idle"),
    ("vmm_weights_bytes", "memory of the weights; 0 asleep"),
    ("vmm_room_tokens", "how many tokens more the cache could take, by where"),
    ("vmm_pool_bytes", "memory of a device's pool by kind"),
];

/// The recorder of a server.
pub struct Meters {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
}

/// One of the figures.
type Read<T> = fn(&T) -> u64;

/// The meters of one model.
pub struct ModelMeters {
    counters: Vec<(Counter, Read<EngineFigures>)>,
    gauges: Vec<(Gauge, Read<EngineFigures>)>,
    step_us: Histogram,
    handle: PrometheusHandle,
}

impl Meters {
    /// A recorder.
    ///
    /// # Errors
    /// Buckets that cannot be: none of ours.
    pub fn new() -> Result<Meters, BuildError> {
        let matcher = Matcher::Full(STEP_US.to_owned());
        let builder = PrometheusBuilder::new();
        let recorder = builder.set_buckets_for_metric(matcher, &STEP_BUCKETS_US)?.build_recorder();
        for (name, text) in COUNTERS {
            recorder.describe_counter(KeyName::from_const_str(name), None, text.into());
        }
        for (name, text) in GAUGES {
            recorder.describe_gauge(KeyName::from_const_str(name), None, text.into());
        }
        let text = "time of a step: growth that it waited for, and the device's work";
        let name = KeyName::from_const_str(STEP_US);
        recorder.describe_histogram(name, Some(Unit::Microseconds), text.into());
        let handle = recorder.handle();
        Ok(Meters { recorder, handle })
    }

    /// The meters of one model.
    pub fn model(&self, model: &str) -> ModelMeters {
        let counter = |name, kind, read: Read<EngineFigures>| {
            (self.recorder.register_counter(&key(name, model, kind), &METADATA), read)
        };
        let gauge = |name, kind, read: Read<EngineFigures>| {
            (self.recorder.register_gauge(&key(name, model, kind), &METADATA), read)
        };
        const NONE: Option<(&str, &str)> = None;
        let outcome = |value| Some(("outcome", value));
        let kind = |value| Some(("kind", value));
        let counters = vec![
            counter("vmm_requests_total", outcome("finished"), |it| it.counts.finished),
            counter("vmm_requests_total", outcome("refused"), |it| it.counts.refused),
            counter("vmm_requests_total", outcome("failed"), |it| it.counts.failed),
            counter("vmm_requests_total", outcome("cancelled"), |it| it.counts.cancelled),
            counter("vmm_tokens_total", kind("prompt"), |it| it.counts.prompt_tokens),
            counter("vmm_tokens_total", kind("answer"), |it| it.counts.answered_tokens),
            counter("vmm_kv_mismatches_total", NONE, |it| it.counts.mismatches),
            counter("vmm_preemptions_total", kind("parked"), |it| it.counts.parked),
            counter("vmm_preemptions_total", kind("resumed"), |it| it.counts.resumed),
            counter("vmm_preemptions_total", kind("dropped"), |it| it.counts.dropped),
            counter("vmm_steps_total", NONE, |it| it.counts.steps),
            counter("vmm_sleeps_total", NONE, |it| it.counts.sleeps),
            counter("vmm_wakes_total", NONE, |it| it.counts.wakes),
            counter("vmm_kv_growths_total", kind("ahead"), |it| it.cache.background_growths),
            counter("vmm_kv_growths_total", kind("waited"), |it| it.cache.foreground_growths),
        ];
        let gauges = vec![
            gauge("vmm_requests", kind("running"), |it| it.running - it.parked),
            gauge("vmm_requests", kind("parked"), |it| it.parked),
            gauge("vmm_requests", kind("waiting"), |it| it.waiting),
            gauge("vmm_kv_bytes", kind("committed"), |it| it.cache.committed_bytes),
            gauge("vmm_kv_bytes", kind("shared"), |it| it.cache.shared_bytes),
            gauge("vmm_kv_bytes", kind("live"), |it| it.cache.live_bytes),
            gauge("vmm_kv_bytes", kind("slack"), |it| it.cache.slack_bytes),
            gauge("vmm_kv_bytes", kind("idle"), |it| it.cache.idle_bytes),
            gauge("vmm_kv_bytes", kind("parked"), |it| it.cache.parked_bytes),
            gauge("vmm_kv_bytes", kind("borrowed"), |it| it.cache.borrowed_bytes),
            gauge("vmm_weights_bytes", NONE, |it| it.weights_bytes),
            gauge("vmm_room_tokens", kind("here"), |it| it.room.here_tokens),
            gauge("vmm_room_tokens", kind("borrowed"), |it| it.room.borrowed_tokens),
            gauge("vmm_room_tokens", kind("host"), |it| it.room.host_tokens),
        ];
        let step_us = self.recorder.register_histogram(&key(STEP_US, model, NONE), &METADATA);
        ModelMeters { counters, gauges, step_us, handle: self.handle.clone() }
    }

    /// Everything, the pool's present figures included, in Prometheus' text form.
    pub fn render(&self, pool: &Pool) -> String {
        for (device, stats) in pool.stats().devices {
            let kinds: [(&str, Read<DeviceStats>); 7] = [
                ("held", |it| it.held_bytes),
                ("elastic", |it| it.elastic_bytes),
                ("stock", |it| it.stock_bytes),
                ("live", |it| it.live_bytes),
                ("lent", |it| it.lent_bytes),
                ("borrowed", |it| it.borrowed_bytes),
                ("limit", |it| it.limit_bytes),
            ];
            for (kind, read) in kinds {
                let labels =
                    vec![Label::new("device", device.0.to_string()), Label::new("kind", kind)];
                let key = Key::from_parts("vmm_pool_bytes", labels);
                self.recorder.register_gauge(&key, &METADATA).set(read(&stats) as f64);
            }
        }
        self.handle.render()
    }
}

impl ModelMeters {
    /// Counts a step.
    pub fn step(&self, figures: &StepFigures) {
        self.step_us.record(figures.step_us);
    }

    /// Shows the present figures.
    pub fn publish(&self, figures: &EngineFigures) {
        self.counters.iter().for_each(|(counter, read)| counter.absolute(read(figures)));
        self.gauges.iter().for_each(|(gauge, read)| gauge.set(read(figures) as f64));
        // Steps are kept one by one until this adds them up.
        self.handle.run_upkeep();
    }
}

fn key(name: &'static str, model: &str, label: Option<(&'static str, &'static str)>) -> Key {
    let mut labels = vec![Label::new("model", model.to_owned())];
    labels.extend(label.map(|(name, value)| Label::new(name, value)));
    Key::from_parts(name, labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_rendered_by_model_and_kind() {
        let meters = Meters::new().unwrap();
        let model = meters.model("m");
        let mut figures = EngineFigures::default();
        figures.counts.mismatches = 3;
        figures.cache.live_bytes = 7;
        model.publish(&figures);
        model.step(&StepFigures { step_us: 150.0, ..StepFigures::default() });
        let driver: std::sync::Arc<dyn vmm_sys::Driver> = vmm_sys::sim::Sim::builder().build();
        let pool = Pool::builder(driver).limit_bytes(1 << 30).build().unwrap();
        let text = meters.render(&pool);
        for line in [
            "vmm_kv_mismatches_total{model=\"m\"} 3",
            "vmm_kv_bytes{model=\"m\",kind=\"live\"} 7",
            "vmm_step_us_bucket{model=\"m\",le=\"200\"} 1",
            "vmm_step_us_bucket{model=\"m\",le=\"100\"} 0",
            "vmm_pool_bytes{device=\"0\",kind=\"limit\"} 1073741824",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}
