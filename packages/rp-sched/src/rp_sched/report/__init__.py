"""Reports on schedules: charts, tables and traces."""
