-- wrk's half of the measurement: a POST with a key for each request, fresh or known, and the sums as one line of JSON.
-- wrk … -s http_load.lua <url> -- first|replay <prefix> <known keys> <body>
local number = 0

function init(args)
  kind, prefix, known, wrk.body = args[1], args[2], tonumber(args[3]), args[4]
  wrk.method = "POST"
  wrk.headers["Content-Type"] = "application/json"
end

function request()
  number = number + 1
  if kind == "first" then
    wrk.headers["Idempotency-Key"] = prefix .. "-" .. number
  else
    wrk.headers["Idempotency-Key"] = prefix .. "-known-" .. (number % known)
  end
  return wrk.format()
end

function done(summary, latency, requests)
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format('\n{"requests": %d, "seconds": %f, "refused": %d, "failed": %d}\n',
    summary.requests, summary.duration / 1000000, errors.status, failed))
end
